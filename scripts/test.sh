#!/usr/bin/env bash
# Every check of the project: ruff, codespell, the word list, mypy, pytest. Arguments go to pytest.
# With --all, as before a release, also the tests that are marked `thorough`: more models, engines,
# seeds and messages, random faults, every restart of the launcher, the dashboard in a browser, and
# the real Slurm of tests/cluster.
# With --gpu, on a machine with a GPU: only the tests that are marked `gpu`, which see the GPUs; the
# other tests do not. They run one after the other, without the static checks.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
source scripts/slurm.sh
source scripts/chromium.sh

extras="text,dev"
case " $* " in *" --all "*) extras+=",trainers" ;; esac  # TRL and Lightning
ensure_environment "$extras"
case " $* " in *" --gpu "*)
    exec python -m pytest -q --durations=15 "$@"
    ;;
esac
echo "== ruff check"
ruff check .
echo "== ruff format --check"
ruff format --check --quiet .
echo "== codespell"
codespell
echo "== words"
python scripts/words.py
case " $* " in *" --all "*)
    echo "== Slurm, for tests/cluster"
    why=$(ensure_slurm) || echo "tests/cluster is skipped: $why"
    echo "== Chromium, for tests/cli/test_dashboard.py"
    why=$(ensure_chromium) || echo "the tests in a browser are skipped: $why"
    ;;
esac
echo "== mypy and pytest, at the same time"
# mypy needs a minute where it has no cache, on one core
types=$(mktemp)
mypy >"$types" 2>&1 &
checker=$!
# a file in one process, since its launches are shared by its tests; three at a time, since they wait
# for one another, and with one thread each, since they are more than the cores of a small machine
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# the tests start hundreds of interpreters, which would compile the package anew
unset PYTHONDONTWRITEBYTECODE

# Ends the tests after some time: the workers of pytest first, which write down where they are, so
# that it says which test each of them ran; then pytest itself, if that does not end it.
end_tests() {
    trap 'kill $! 2>/dev/null; exit' TERM
    sleep "$1" &
    wait
    echo "error: the tests are not done after $1 s" >&2
    local tests
    tests=$(pgrep -P $$ -f "python -m pytest")
    pkill -ABRT -P "$tests" || true
    sleep 60
    kill -ABRT "$tests"
}

limit=2700
case " $* " in *" --all "*) limit=14400 ;; esac
end_tests "$limit" &
watcher=$!
trap 'kill $checker $watcher 2>/dev/null || true; rm -f "$types"' EXIT
status=0
# a worker that has died is not replaced: the new one would run the same test again, and die of it
python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
    --durations=15 "$@" || status=$?
echo "== mypy"
wait $checker || status=1
cat "$types"
exit $status
