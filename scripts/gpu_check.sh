#!/usr/bin/env bash
# What only a GPU can show, on one GPU, in slices of under ten minutes: docs/how-to/gpu-check.md.
# Usage: [WHEELS=folder] [OUT=folder] scripts/gpu_check.sh SLICE...
# A SLICE is kernels, training, memory, throughput, or all; the most informative come first.
# WHEELS is a folder of wheels for a machine without a network. SIZE=tiny rehearses a slice, on a CPU too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || set -- --help
if [ -n "${WHEELS:-}" ]; then
    site="${TMPDIR:-/tmp}/gpu-check-site"
    [ -d "$site" ] || python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# Asked in a process of its own: the processes of the parts decide nothing. A GPU that torch cannot use is an error.
# DeepSpeed compiles its operators for this GPU alone, and not for all that its compiler knows.
found="$(python3 -c '
import torch
from ds_finetune.engine.devices import choose_device
device = choose_device()
capability = "{}.{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else ""
print(device, capability)')"
read -r DS_ACCELERATOR capability <<< "${found##*$'\n'}"
export DS_ACCELERATOR
[ -z "$capability" ] || export TORCH_CUDA_ARCH_LIST="$capability"
exec python3 -m bench.gpu "$@" --out "${OUT:-runs/gpu_check}" --size "${SIZE:-full}"
