#!/usr/bin/env bash
# Each fault on a test bed of hosts, ten times at random moments: a table of what was left. Arguments: --tries N, faults.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh test
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
exec python -m tests.cluster.faults "$@"
