#!/usr/bin/env bash
# Builds the documentation into site/; a warning, such as a broken link, fails. Arguments go to
# mkdocs: `scripts/docs.sh serve` shows the pages at http://127.0.0.1:8000 while they are edited.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

ensure_environment "docs"
export NO_MKDOCS_2_WARNING=1 # news of other projects
if [ $# -gt 0 ]; then
    exec mkdocs "$@"
fi
mkdocs build --strict
