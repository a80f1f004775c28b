# Sourced by the other scripts: installs what tests/cluster needs, a real Slurm.
#
#   ensure_slurm     returns 1, and says why, where the tests of a cluster cannot run

ensure_slurm() {
    local program missing=""
    local install=(apt-get install -y -qq --no-install-recommends slurm-wlm iproute2)
    # a mirror that does not answer must not hold up the other tests
    local apt=(timeout 240 env DEBIAN_FRONTEND=noninteractive)
    [ "$(uname)" = Linux ] || { echo "not Linux, whose namespaces are needed"; return 1; }
    [ "$(id -u)" = 0 ] || { echo "not root, which namespaces with networks need"; return 1; }
    unshare --mount --net --pid --fork --mount-proc true 2>/dev/null ||
        { echo "the kernel, or a container, gives no namespaces"; return 1; }
    for program in slurmctld slurmd srun ip; do
        command -v $program >/dev/null || missing="$missing $program"
    done
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null || { echo "not installed:$missing"; return 1; }
    # the lists of packages may be missing or old
    "${apt[@]}" "${install[@]}" >/dev/null 2>&1 ||
        { "${apt[@]}" apt-get update -qq >/dev/null 2>&1 && "${apt[@]}" "${install[@]}" >/dev/null 2>&1; } ||
        { echo "apt-get cannot install slurm-wlm and iproute2"; return 1; }
}
