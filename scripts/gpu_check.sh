#!/usr/bin/env bash
# Checks this project on a machine with one or more GPUs: the speed of a GPT of 350M parameters, host
# cost, what only a GPU has, and memory; then exactness until the time is over. Needs PyTorch and what
# the checks import, and prints one table, which is also in gpu_check.json, as far as it has come.
#
#   scripts/gpu_check.sh                       8 minutes, all stages in one process
#   scripts/gpu_check.sh --quick               3 minutes: less of the exactness matrix
#   scripts/gpu_check.sh --processes 4         a process for each of 4 ranks, which share GPUs over NCCL
#                                              if there are fewer (world.share_gpus); also with --quick
#   scripts/gpu_check.sh --bits                the same bits with world.replicas=4 on 1, 2 and 4 processes,
#                                              and what they cost; writes gpu_bits.json
#   scripts/gpu_check.sh --device cpu --small  to try the script itself; also with --processes, --bits
#   scripts/gpu_check.sh --json FILE           another file than gpu_check.json; scripts/gpu_page.py
#                                              writes such files into docs/benchmarks.md
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# works with and without an installed package: the checkout comes first
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# cuBLAS repeats its results with a fixed workspace only
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
processes="" bits="" seconds=450 limit_s=480
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --processes) processes=${2:?how many processes?} && shift ;;
    --processes=*) processes=${1#*=} ;;
    --bits) bits=1 ;;
    --quick) seconds=165 limit_s=180 ;;
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
    import scripts.gpu_bits
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
limit=(timeout --signal=INT --kill-after=20 "$limit_s")
if [ -n "$bits" ]; then
    exec "${limit[@]}" "$python" "$root/scripts/gpu_bits.py" "${arguments[@]}"
fi
if [ -z "$processes" ]; then
    exec "${limit[@]}" "$python" "$root/scripts/gpu_check.py" --seconds "$seconds" "${arguments[@]}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${limit[@]}" "$python" "$root/scripts/gpu_processes.py" --processes "$processes" \
    --seconds "$seconds" "${arguments[@]}"
