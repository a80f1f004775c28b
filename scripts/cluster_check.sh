#!/usr/bin/env bash
# All tests of launching on a real Slurm, of three nodes in namespaces of this machine (tests/cluster);
# `scripts/test.sh --all` runs the core of them. Needs Debian or Ubuntu and root, and installs slurm-wlm and
# iproute2. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
source scripts/slurm.sh

if ! why=$(ensure_slurm); then
    echo "error: the cluster tests cannot run here: $why" >&2
    exit 1
fi
ensure_environment "dev"
export OMP_NUM_THREADS=1 HYBRIDTRAIN_CLUSTER_REQUIRED=1
echo "== pytest tests/cluster ($(slurmd -V))"
python -m pytest -q --all tests/cluster "$@"
