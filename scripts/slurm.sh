# Sourced by the other scripts: installs what tests/cluster needs, a real Slurm.
#
#   ensure_slurm     returns 1, and says why, where the tests of a cluster cannot run

source scripts/apt.sh

ensure_slurm() {
    local program missing=""
    [ "$(uname)" = Linux ] || { echo "not Linux, whose namespaces are needed"; return 1; }
    [ "$(id -u)" = 0 ] || { echo "not root, which namespaces with networks need"; return 1; }
    unshare --mount --net --pid --fork --mount-proc true 2>/dev/null ||
        { echo "the kernel, or a container, gives no namespaces"; return 1; }
    for program in slurmctld slurmd srun ip; do
        command -v $program >/dev/null || missing="$missing $program"
    done
    [ -n "$missing" ] || return 0
    apt_install slurm-wlm iproute2
}
