#!/usr/bin/env bash
# Runs the tests with the oldest release of each required dependency that pyproject.toml allows.
# Arguments go to pytest. The environment is .venv-oldest.
#
# PYTHON   the interpreter to build on, which must be one that the oldest torch has (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-oldest
[ -x $environment/bin/python ] || "${PYTHON:-python3}" -m venv $environment
export VIRTUAL_ENV="$PWD/$environment"
PATH="$VIRTUAL_ENV/bin:$PATH"
python -m pip install --quiet --disable-pip-version-check uv
requirements=(uv pip compile --quiet --no-header --no-annotate pyproject.toml)
"${requirements[@]}" --resolution lowest-direct --no-deps --output-file $environment/oldest.txt
echo "== the required dependencies" && cat $environment/oldest.txt
# What they and the extras need in turn is the newest that goes with them. pyarrow does not declare
# that it needs NumPy 2 from 26 on.
cp $environment/oldest.txt $environment/constraints.txt
grep -q '^numpy==1\.' $environment/oldest.txt && echo "pyarrow<26" >>$environment/constraints.txt
"${requirements[@]}" --extra text --extra dev --constraint $environment/constraints.txt --output-file $environment/all.txt
python -m pip install --disable-pip-version-check --constraint $environment/all.txt -e ".[text,dev]"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
