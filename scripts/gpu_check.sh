#!/usr/bin/env bash
# Checks this project on a machine with one or more GPUs: exactness, host cost, memory, and the
# speed of a GPT of 350M parameters. Needs what README names, and prints one table in 8 minutes.
#
#   scripts/gpu_check.sh                       on GPUs, all stages in one process
#   scripts/gpu_check.sh --processes 4         a process for each stage (engine=distributed): by NCCL
#                                              with 4 GPUs, by gloo with fewer
#   scripts/gpu_check.sh --device cpu --small  to try the script itself; also with --processes
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# works with and without an installed package: the checkout comes first
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# cuBLAS repeats its results with a fixed workspace only
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
processes=""
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --processes) processes=${2:?how many processes?} && shift ;;
    --processes=*) processes=${1#*=} ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
python=${PYTHON:-python3}
if [ -z "$processes" ]; then
    exec timeout --signal=INT 480 "$python" "$root/scripts/gpu_check.py" "${arguments[@]}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec timeout --signal=INT 480 "$python" -m torch.distributed.run --standalone \
    --nproc-per-node "$processes" "$root/scripts/gpu_processes.py" "${arguments[@]}"
