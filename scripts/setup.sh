#!/usr/bin/env bash
# Makes .venv in the repository root and installs the package with its dev
# extra into it. Does nothing when pyproject.toml is as it was installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted() { pwd && cat pyproject.toml; }

if .venv/bin/python -c "" 2>/dev/null && wanted | cmp -s - .venv/installed; then
  exit 0
fi

new_enough="import sys; sys.exit(sys.version_info < (3, 11))"
if ! .venv/bin/python -c "$new_enough" 2>/dev/null; then
  python=""
  for name in python3 python3.13 python3.12 python3.11 python; do
    if "$name" -c "$new_enough" 2>/dev/null; then
      python="$name"
      break
    fi
  done
  if [[ -z "$python" ]]; then
    echo "setup: no Python on PATH is 3.11 or newer; install one," \
      "with its venv module." >&2
    exit 1
  fi
  echo "setup: making .venv with $("$python" --version)" >&2
  "$python" -m venv --clear .venv
fi

echo "setup: installing into .venv (about 700 MB)" >&2
pip=(.venv/bin/python -m pip --disable-pip-version-check)
if ! .venv/bin/uv --version >/dev/null 2>&1; then
  # uv installs in seconds; without it, pip does the same in a minute.
  "${pip[@]}" install --quiet uv || true
fi
.venv/bin/uv pip install --quiet --python .venv/bin/python -e ".[dev]" ||
  "${pip[@]}" install --quiet -e ".[dev]"
wanted > .venv/installed
