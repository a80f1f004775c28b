#!/usr/bin/env bash
# Checks this project on a machine with one or more GPUs: the speed of a GPT of 350M parameters, host
# cost, exactness, what only a GPU has, and memory, in this order. Needs PyTorch and what the checks
# import, and prints one table in 8 minutes, which is also in gpu_check.json, as far as it has come.
#
#   scripts/gpu_check.sh                       on GPUs, all stages in one process
#   scripts/gpu_check.sh --seconds 180         the main figures: less of the exactness matrix
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
# what is missing or too old, in one line, and not by the import that fails first
"$python" - "$root/pyproject.toml" <<'END'
import re
import sys
from importlib.metadata import packages_distributions, version

if sys.version_info < (3, 11):
    sys.exit(f"gpu_check: Python {sys.version.split()[0]} is older than 3.11: set PYTHON=")
import tomllib

try:
    import scripts.gpu_check
    import scripts.gpu_processes
except ModuleNotFoundError as error:
    sys.exit(f"gpu_check: {error.name} is not installed ({sys.executable}): install it, or set PYTHON=")
# of the packages that the checks have imported, and of no others
names = {module.partition(".")[0] for module in sys.modules}
imported = {name for key, found in packages_distributions().items() if key in names for name in found}
with open(sys.argv[1], "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
problems = []
for name, least in (re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in dependencies):
    if name not in imported:
        continue
    numbers = [[int(n) for n in re.findall(r"\d+", text)[:2]] for text in (version(name), least)]
    if numbers[0] < numbers[1]:
        problems.append(f"{name} {version(name)} is older than {least}")
if problems:
    sys.exit(f"gpu_check: {', '.join(problems)} ({sys.executable}): install it, or set PYTHON=")
END
# a check that hangs outside of Python does not hear the first signal; the rows are in the file
limit=(timeout --signal=INT --kill-after=20 480)
if [ -z "$processes" ]; then
    exec "${limit[@]}" "$python" "$root/scripts/gpu_check.py" "${arguments[@]}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${limit[@]}" "$python" -m torch.distributed.run --standalone \
    --nproc-per-node "$processes" "$root/scripts/gpu_processes.py" "${arguments[@]}"
