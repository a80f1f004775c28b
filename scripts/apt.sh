# Sourced by other scripts: installs packages of the system.
#
#   apt_install PACKAGES...     returns 1, and says why, where that cannot be done

apt_install() {
    local install=(apt-get install -y -qq --no-install-recommends "$@")
    # a mirror that does not answer must not hold up the other tests
    local apt=(timeout 240 env DEBIAN_FRONTEND=noninteractive)
    command -v apt-get >/dev/null || { echo "not installed, and there is no apt-get: $*"; return 1; }
    # the lists of packages may be missing or old
    "${apt[@]}" "${install[@]}" >/dev/null 2>&1 ||
        { "${apt[@]}" apt-get update -qq >/dev/null 2>&1 && "${apt[@]}" "${install[@]}" >/dev/null 2>&1; } ||
        { echo "apt-get cannot install $*"; return 1; }
}
