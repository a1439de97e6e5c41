#!/usr/bin/env bash
# The tests that the default suite leaves out, in slices that resume; scripts/slow_slices.py says what arguments it takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh test
export DS_ACCELERATOR="${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python scripts/slow_slices.py "$@"
