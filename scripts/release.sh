#!/usr/bin/env bash
# The steps of a release before it is published, as .github/workflows/release.yml runs them. The
# package's files end up in dist/.
#
#   scripts/release.sh TAG [STEP...]      such as scripts/release.sh v0.2.0
#
# version   the tag, the package, CITATION.cff and CHANGELOG.md name the same version
# build     makes the source distribution, from it the wheel, and checks both as PyPI does
# install   tries the wheel (scripts/wheel.sh) on each of PYTHONS, and with the oldest PyTorch
# test      scripts/test.sh --all
#
# STEP      default: all of them
# PYTHON    the interpreter for `build` and for the oldest PyTorch (default: python3)
# PYTHONS   default: python3.11 python3.12 python3.13; those that are not installed are left out,
#           and named at the end
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:-}
[ $# -le 1 ] && set -- "$tag" version build install test
shift
PYTHON=${PYTHON:-python3}
missing=""

step_version() {
    local version
    version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hybridtrain/__init__.py)
    fail() { echo "error: $1, but hybridtrain/__init__.py has version $version" >&2; exit 1; }
    [[ "$tag" == "v$version" ]] || fail "the tag is '$tag'"
    grep -qxF "version: $version" CITATION.cff || fail "CITATION.cff has '$(grep '^version:' CITATION.cff)'"
    grep -qxF "## $version" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version'"
}

step_build() {
    local tools
    tools=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$tools'" EXIT
    "$PYTHON" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine
    rm -f dist/hybridtrain-*
    # from a copy of the files that git knows: a build/ of an earlier version would be packed too
    mkdir "$tools/source"
    git ls-files -z | tar --null -cf - -T - | tar -xf - -C "$tools/source"
    "$tools/bin/python" -m build --outdir dist "$tools/source"
    "$tools/bin/python" -m twine check --strict dist/hybridtrain-*
}

step_install() {
    local wheel python
    wheel=$(echo dist/hybridtrain-*.whl)
    for python in ${PYTHONS:-python3.11 python3.12 python3.13}; do
        if "$python" --version >/dev/null 2>&1; then
            echo "== $wheel on $("$python" --version)"
            PYTHON=$python WHEEL=$wheel scripts/wheel.sh
        else
            missing+=" $python"
        fi
    done
    echo "== $wheel with the oldest PyTorch"
    WHEEL=$wheel WITH="torch==2.11.* torchvision==0.26.*" PYTHON=$PYTHON scripts/wheel.sh
}

step_test() { scripts/test.sh --all; }

for step; do
    case $step in
    version | build | install | test) ;;
    *) echo "error: there is no step '$step': version, build, install, test" >&2; exit 2 ;;
    esac
done
for step; do "step_$step"; done
if [ -n "$missing" ]; then echo "not installed, so the wheel was not tried on:$missing"; fi
