# Sourced by the other scripts: installs what tests in a browser and screenshots need, a Chromium.
#
#   ensure_chromium     returns 1, and says why, where there can be none

source scripts/apt.sh

ensure_chromium() {
    local program
    for program in chromium chromium-browser google-chrome; do
        if command -v $program >/dev/null; then return 0; fi
    done
    [ "$(id -u)" = 0 ] || { echo "not installed, and not root, who may install it"; return 1; }
    apt_install chromium fonts-liberation
}
