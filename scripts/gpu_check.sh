#!/usr/bin/env bash
# Checks this project on a machine with one or more GPUs: exactness, what only a GPU has, host cost,
# memory, and the speed of a GPT of 350M parameters. Needs what README names, and prints one table
# in 8 minutes, which is also in gpu_check.json.
#
#   scripts/gpu_check.sh                       on GPUs
#   scripts/gpu_check.sh --device cpu --small  to try the script itself
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# works with and without an installed package: the checkout comes first
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# cuBLAS repeats its results with a fixed workspace only
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
exec timeout --signal=INT 480 "${PYTHON:-python3}" "$root/scripts/gpu_check.py" "$@"
