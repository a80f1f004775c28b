#!/usr/bin/env bash
# Builds a wheel, installs it with its required dependencies alone into a new environment outside
# the checkout, and trains, lists and evaluates the recipe `digits` there. With a folder as the
# argument, the wheel is kept in it. tests/cli/test_wheel.py checks more, without a network.
#
#   scripts/wheel.sh [FOLDER]
#
# PYTHON   the interpreter to build and install with (default: python3)
# WHEEL    a wheel to check instead of building one
# WITH     further requirements of the environment, such as "torch==2.11.* torchvision==0.26.*"
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/source" "$folder/dist" "$folder/empty"
"${PYTHON:-python3}" -m venv "$folder/environment"
PATH="$folder/environment/bin:$PATH"
pip=(python -m pip --disable-pip-version-check)

if [ -n "${WHEEL:-}" ]; then
    cp "$WHEEL" "$folder/dist"
else
    echo "== building the wheel"
    # from a copy of the files that git knows: a build/ of an earlier version would be packed too
    (cd "$root" && git ls-files -z --cached --others --exclude-standard -- hybridtrain configs \
        recipes pyproject.toml setup.py README.md LICENSE |
        tar --null -cf - -T - | tar -xf - -C "$folder/source")
    "${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder/dist" "$folder/source"
fi
[ $# -eq 0 ] || { mkdir -p "$1" && cp "$folder"/dist/*.whl "$1"; }

echo "== installing it (PyTorch is large: some minutes)"
cd "$folder/empty"
unset PYTHONPATH
# shellcheck disable=SC2086 # several requirements
"${pip[@]}" install --quiet "$folder"/dist/*.whl ${WITH:-}

run() { echo "== $*" && "$@"; }
run hybridtrain --version
run hybridtrain --help >/dev/null
run hybridtrain recipe=digits trainer.steps=2 trainer.epochs=null world.devices=cpu
run hybridtrain results digits
run hybridtrain evaluate run_name=digits world.devices=cpu
echo "the wheel works: $(basename "$folder"/dist/*.whl)"
