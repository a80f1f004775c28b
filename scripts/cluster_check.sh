#!/usr/bin/env bash
# Tests of launching on a real Slurm, of three nodes in namespaces of this machine (tests/cluster).
# Needs Debian or Ubuntu and root, and installs slurm-wlm and iproute2. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

cannot() {
    echo "error: the cluster tests cannot run here: $*" >&2
    exit 1
}

[ "$(uname)" = Linux ] || cannot "Linux is needed, for its namespaces"
[ "$(id -u)" = 0 ] || cannot "root is needed, for namespaces with networks; try: sudo $0"
unshare --net --pid --fork --mount-proc true 2>/dev/null || cannot "the kernel gives no namespaces"
missing=""
for program in slurmctld slurmd srun ip; do
    command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null || cannot "not installed:$missing"
    echo "== installing slurm-wlm and iproute2"
    install=(apt-get install -y -qq --no-install-recommends slurm-wlm iproute2)
    # the lists of packages may be missing or old
    DEBIAN_FRONTEND=noninteractive "${install[@]}" >/dev/null 2>&1 ||
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive "${install[@]}" >/dev/null; } ||
        cannot "apt-get does not find slurm-wlm and iproute2"
fi
ensure_environment "dev"
export OMP_NUM_THREADS=1 HYBRIDTRAIN_CLUSTER_REQUIRED=1
echo "== pytest tests/cluster ($(slurmd -V))"
python -m pytest -q tests/cluster "$@"
