#!/usr/bin/env bash
# Makes the screenshots in docs/assets from real runs, in some minutes; needs Chromium.
#
#   scripts/screenshots.sh                          all of them
#   scripts/screenshots.sh --runs /tmp/runs         keeps the runs there, and takes those it has
#   scripts/screenshots.sh --only hyperparameters   some, by name
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
source scripts/chromium.sh

ensure_environment "text,dev"
ensure_chromium
export OMP_NUM_THREADS=1
python -m scripts.screenshots "$@"
