#!/usr/bin/env bash
# Install, train the embedded example on every visible GPU (or two CPU ranks), export it and ask the export three questions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
before="${VIRTUAL_ENV:-}"
. scripts/install.sh pages
ranks="$(python -c 'import torch; print(torch.cuda.device_count() or 2)')"
folder="${1:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}"
ds-finetune demo "$folder" --ranks "$ranks"
# By this environment's Python: `torchrun` may be that of the system's.
python -m torch.distributed.run --standalone --nproc-per-node "$ranks" ds_finetune/train.py "$folder/run.yaml"
ds-finetune ask "$folder/run/export" 1969-07-20 1989-11-09 2024-02-29
if [ "${VIRTUAL_ENV:-}" != "$before" ]; then
    printf 'to use ds-finetune in this shell: . %q/bin/activate\n' "$VIRTUAL_ENV"
fi
