#!/usr/bin/env bash
# Every check of the project, and the soak, which takes some minutes more. Arguments go to pytest.
set -euo pipefail
THOROUGH=1 exec "$(dirname "$0")/test.sh" "$@"
