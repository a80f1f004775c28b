# Sourced by the other scripts: makes .venv and installs the project into it, once.
#
#   ensure_environment EXTRAS     e.g. text,dev; an empty string for the project alone
#
# PYTHON names the interpreter to build on (default: the first of python3, python3.13, python3.12,
# python3.11 that fits).

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11, 3.12 or 3.13 is needed; set PYTHON to one" >&2
    return 1
}

ensure_environment() {
    local extras=$1 stamp=".venv/.installed-${1//,/-}" python wanted
    # what an installation depends on; another interpreter, project file or place installs anew
    wanted=$(cat pyproject.toml scripts/environment.sh; pwd)
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "== .venv is up to date: nothing to install"
    else
        if [ ! -x .venv/bin/python ]; then
            python=$(find_python)
            echo "== making .venv with $("$python" --version)"
            "$python" -m venv .venv
        fi
        echo "== installing hybridtrain${extras:+[$extras]} into .venv (PyTorch is large: some minutes)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
        echo "$wanted" >"$stamp"
    fi
    PATH="$PWD/.venv/bin:$PATH"
}
