#!/usr/bin/env bash
# Install, train the embedded example on every GPU (or two CPU ranks), export it and ask the export three questions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
before="${VIRTUAL_ENV:-}"
. scripts/install.sh ""
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" = 0 ]; then export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1; fi
folder="${1:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}"
ranks="$([ "$gpus" = 0 ] && echo 2 || echo "$gpus")"
ds-finetune demo "$folder" --ranks "$ranks"
deepspeed --num_gpus "$ranks" ds_finetune/train.py "$folder/run.yaml"
ds-finetune ask "$folder/run/export" 1969-07-20 1989-11-09 2024-02-29
if [ "${VIRTUAL_ENV:-}" != "$before" ]; then
    printf 'to use ds-finetune in this shell: . %q/bin/activate\n' "$VIRTUAL_ENV"
fi
