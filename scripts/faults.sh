#!/usr/bin/env bash
# Ten times each on a test bed of hosts: faults of launched runs at random steps, then, without arguments, faults of runs
# that no launcher watches. A table says what was not as expected. Arguments: --tries N, names of faults of launched runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh test
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
python -m tests.cluster.faults "$@"
[ $# -gt 0 ] || python -m tests.cluster.watchdog.test_hosts --tries 10
