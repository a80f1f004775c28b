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

# Prints the index of PyTorch's CPU builds where there is no GPU and the index can be reached.
cpu_index() {
    local index=https://download.pytorch.org/whl/cpu
    if ! nvidia-smi >/dev/null 2>&1 && "$1" -c '
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()' "$index" 2>/dev/null; then
        echo "$index"
    fi
}

ensure_environment() {
    local extras=$1 stamp=".venv/.installed-${1//,/-}" python wanted index
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
        index=$(cpu_index .venv/bin/python)
        # both from one index: torchvision does not load with another build of torch
        if [ -n "$index" ] && ! .venv/bin/python -c 'import torch, torchvision' 2>/dev/null; then
            echo "== no GPU: installing the CPU builds of PyTorch from $index"
            .venv/bin/python -m pip install --disable-pip-version-check --index-url "$index" \
                'torch>=2.11' torchvision
        fi
        echo "== installing hybridtrain${extras:+[$extras]} into .venv (PyTorch is large: some minutes)"
        .venv/bin/python -m pip install --disable-pip-version-check -e ".${extras:+[$extras]}"
        echo "$wanted" >"$stamp"
    fi
    PATH="$PWD/.venv/bin:$PATH"
}
