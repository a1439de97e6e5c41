#!/usr/bin/env bash
# The tests that the default suite leaves out, in slices that resume; scripts/slow_slices.py says what arguments it takes.
# With --system-packages as the first one, missing Debian packages are named and installed too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
system_packages=""
if [ "${1:-}" = --system-packages ]; then system_packages="$1"; shift; fi
. scripts/system_packages.sh "$system_packages"
. scripts/install.sh test
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python scripts/slow_slices.py "$@"
