#!/usr/bin/env bash
# What only a GPU can show, on one GPU: the selftest and optimizers there, Liger's kernel, fp16, and a real vocabulary with tokens/s and MFU.
# Usage: [WHEELS=folder] scripts/gpu_check.sh DATA.jsonl MODEL_FOLDER [OUT]
# MODEL_FOLDER holds config.json and a tokenizer; weights are random. WHEELS is a folder of wheels for a machine without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data="$1" model="$2" out="${3:-runs/gpu_check}"
if [ -n "${WHEELS:-}" ]; then
    pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
    pip install --quiet --no-index --no-deps --no-build-isolation -e .
fi
export DS_ACCELERATOR="${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}"
if python -c 'import pytest' 2>/dev/null; then
    python -m pytest -q tests/model/test_liger.py tests/model/test_loss.py tests/parity/test_optimizers.py
fi
ds-finetune selftest
mkdir -p "$out"
common=("data.train=$data" "model.path=$model" "model.weights=random" "log.trackers=[]" "eval.keep_best=false" "export.at_end=false")
cat > "$out/run.yaml" <<YAML
model: {path: $model, weights: random}
data: {train: $data, columns: {prompt: question, completion: answer}, cache_dir: $out/cache}
train: {for: ${STEPS:-40} steps, global_batch_size: 8, micro_batch_size: ${MICRO:-4}, max_seq_len: ${LENGTH:-2048}}
optim: {lr: 1.0e-3}
output_dir: $out/run
YAML
for choice in ds_configs/zero3.json ds_configs/zero2_offload.json; do
    for precision in bf16 $([ "$DS_ACCELERATOR" = cuda ] && echo fp16); do
        echo "== $choice $precision"
        ds-finetune train "$out/run.yaml" "${common[@]}" "deepspeed=$choice" "train.precision=$precision" \
            "output_dir=$out/$(basename "$choice" .json)-$precision"
    done
done
ds-finetune bench "$out/run.yaml" "${common[@]}" deepspeed=ds_configs/zero1.json --steps "${BENCH_STEPS:-5}"
