#!/usr/bin/env bash
# Install the extra `docs` and build the documentation site into build/docs; a broken link or anchor is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh docs
python scripts/reference.py
export NO_MKDOCS_2_WARNING=1
exec mkdocs build --strict "$@"
