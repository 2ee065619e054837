#!/usr/bin/env bash
# Writes requirements.txt: every tested package, by version and hash, without index URLs.
set -euo pipefail
cd "$(dirname "$0")/.."
uv lock --quiet
uv export --quiet --frozen --no-emit-project --no-header --no-annotate >requirements.txt
if grep -n '://' requirements.txt; then
  echo "requirements.txt contains a URL. Remove it" >&2
  exit 1
fi
