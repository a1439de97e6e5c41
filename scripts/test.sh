#!/usr/bin/env bash
# Install what is missing and run every check, two test files at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh test
export DS_ACCELERATOR="${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}"
# Some hundred processes import the package, which each of them would compile otherwise.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tests that start ranks have time limits, which compiling DeepSpeed's operators (some minutes) would exceed.
for operator in cpu_adam async_io; do
    python -c "import sys; from ds_finetune.engine.ops.deepspeed_ops import build_op; build_op(sys.argv[1], print)" "$operator" ||
        echo "$operator cannot be compiled here; tests that need it are skipped"
done
ruff check .
mypy
PYTHONPATH=. lint-imports
python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=15 "$@"
