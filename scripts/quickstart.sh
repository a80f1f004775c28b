#!/usr/bin/env bash
# From a fresh clone to a trained model: 2 processes x 2 pipeline stages on real data.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

ensure_environment ""
run=outputs/digits
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun would set, with a warning
echo "== training: torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits $*"
.venv/bin/torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits "$@"

cat <<END

The run is in        $PWD/$run
Accuracy             $(.venv/bin/python -c "
import json
print(format(json.load(open('$run/summary.json'))['eval']['accuracy'], '.4f'), '(on the held-out fifth)')")
See the dashboard    .venv/bin/tensorboard --logdir $(dirname $run)
Train on, from here  .venv/bin/torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits trainer.epochs=40
Run every check      ./scripts/test.sh
END
