#!/usr/bin/env bash
# What only a GPU can show, on one GPU, in slices of under ten minutes: docs/how-to/gpu-check.md.
# Usage: [WHEELS=folder] scripts/gpu_check.sh SLICE [OUT]
# SLICE is correctness, kernels, comparisons, throughput, experts, offload, longest, all, or table, which prints the results in OUT.
# WHEELS is a folder of wheels for a machine without a network. SIZE=tiny rehearses a slice, on a CPU too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
slice="${1:?name a slice: correctness, kernels, comparisons, throughput, experts, offload, longest, all, or table}"
out="${2:-runs/gpu_check}"
if [ -n "${WHEELS:-}" ]; then
    site="${TMPDIR:-/tmp}/gpu-check-site"
    [ -d "$site" ] || python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# Asked in a process of its own: the processes of the parts decide nothing. A GPU that torch cannot use is an error.
DS_ACCELERATOR="$(python3 -c 'from ds_finetune.engine.devices import choose_device; print(choose_device())')"
export DS_ACCELERATOR
exec python3 -m bench.gpu "$slice" --out "$out" --size "${SIZE:-full}"
