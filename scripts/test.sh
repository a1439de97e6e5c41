#!/usr/bin/env bash
# Install the Python packages that are missing and run every check, two test files at a time. Arguments go to pytest.
# With --system-packages as the first one, Debian packages are named and installed too; else what needs them is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
system_packages=""
if [ "${1:-}" = --system-packages ]; then system_packages="$1"; shift; fi
. scripts/system_packages.sh "$system_packages"
. scripts/install.sh test
# GPUs have scripts/gpu_check.sh: two ranks of a test would share one.
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
# Some hundred processes import the package, which each of them would compile otherwise.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tests that start ranks have time limits, which compiling DeepSpeed's operators (some minutes) would exceed.
for operator in cpu_adam async_io; do
    python -c "import sys; from ds_finetune.engine.ops.deepspeed_ops import build_op; build_op(sys.argv[1], print)" "$operator" ||
        echo "$operator cannot be compiled here, and tests that need it are skipped"
done
ruff check .
mypy
PYTHONPATH=. lint-imports
python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=15 "$@"
