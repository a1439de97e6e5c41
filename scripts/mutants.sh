#!/usr/bin/env bash
# Inject deliberate faults one by one and see that the tests find each. Arguments are names of faults; none tries all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh test
export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m tests.mutants "$@"
