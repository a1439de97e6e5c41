#!/usr/bin/env bash
# The tests that the default suite leaves out.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" -m slow "$@"
