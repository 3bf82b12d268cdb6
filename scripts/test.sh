#!/usr/bin/env bash
# Sets up .venv, then checks format, lint and types, and runs the tests.
#   bash scripts/test.sh [--slow] [pytest arguments]
# --slow runs the slow tests (over 20 s each) and no others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marker="not slow"
if [[ "${1:-}" == "--slow" ]]; then
  marker="slow"
  shift
fi

bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
# One compilation cache for all tests and their processes: a second run
# compiles next to nothing.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

ruff format --check .
ruff check .
pyright
# A file stays with one worker: its runs of real processes are made once.
python -m pytest -n 2 --dist=loadscope -m "$marker" "$@"
