#!/usr/bin/env bash
# Writes requirements.txt: every tested package, by version and hash, without index URLs.
set -euo pipefail
cd "$(dirname "$0")/.."
uv lock --quiet
uv export --quiet --frozen --no-emit-project --no-header --no-annotate >requirements.txt
if grep -n '://' requirements.txt; then
  echo "requirements.txt names an address; it must not" >&2
  exit 1
fi
