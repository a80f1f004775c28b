#!/usr/bin/env bash
# Every check of the project, with all cases of the tests that otherwise run a sample, and the soak.
# About twice as long as scripts/test.sh. Arguments go to pytest.
set -euo pipefail
THOROUGH=1 exec "$(dirname "$0")/test.sh" "$@"
