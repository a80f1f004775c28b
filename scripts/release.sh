#!/usr/bin/env bash
# Checks that a tag, the package, CITATION.cff and CHANGELOG.md name the same version: scripts/release.sh v0.2.0
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hybridtrain/__init__.py)
fail() { echo "error: $1, but hybridtrain/__init__.py has version $version" >&2; exit 1; }
[[ "${1:-}" == "v$version" ]] || fail "the tag is '${1:-}'"
grep -qxF "version: $version" CITATION.cff || fail "CITATION.cff has '$(grep '^version:' CITATION.cff)'"
grep -qxF "## $version" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version'"
