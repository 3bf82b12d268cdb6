#!/usr/bin/env bash
# The main job, small: a syncer and four learners on the standard library's
# text; learner 1 is killed a third of the way and comes back at two thirds.
# Further flags go to the launcher, for example --run_dir=DIR. The last line
# printed is the path of the run's summary.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
exec .venv/bin/python -m ddiloco_jax.cli.local --config=configs/tiny.py \
  --learners=4 --kill=1@33%:66% "$@"
