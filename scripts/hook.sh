#!/usr/bin/env bash
# Runs a development tool for a pre-commit hook: scripts/hook.sh TOOL ARGUMENTS...
#
# The tool is the active environment's (venv, uv, conda), or else that of .venv, or else the first
# on the PATH; its version is pyproject.toml's where `.[dev]` is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tool=$1
shift
for folder in "${VIRTUAL_ENV:-/none}/bin" "${CONDA_PREFIX:-/none}/bin" "$root/.venv/bin"; do
    [ ! -x "$folder/$tool" ] || exec "$folder/$tool" "$@"
done
command -v "$tool" >/dev/null || {
    echo "error: $tool is not installed: activate your environment and run pip install -e '.[dev]'" >&2
    exit 1
}
exec "$tool" "$@"
