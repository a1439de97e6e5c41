"""mlx_lm computes with safetensors folders what transformers does. On Linux: pip install 'mlx[cpu]' mlx-lm."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_finetune
from tests.conftest import ROOT
from tests.export.cells import types_of
from tests.export.gguf.models import _YARN, MODELS, greedy, save

TOKENS, PROMPTS = 36, ([5, 6, 7, 8], [3, 9, 10, 11, 12, 13], [20])


LARGEST = 1e-3
"""Largest difference of log-probabilities in fp32: logits of up to 100 in models of a few layers round to 1e-5."""


def run_mlx(name: str, folder: Path) -> tuple[str, bool, float]:
    """Generate greedily with an exported tiny model in mlx_lm and in transformers: what mlx_lm prints as an error,
    whether all tokens are equal, and the largest difference of log-probabilities of the equal ones.
    """
    python = os.environ.get("DS_FINETUNE_MLX")
    if not python:
        pytest.skip("DS_FINETUNE_MLX names no Python of an environment with mlx_lm")
    model = save(name, folder / "hub").eval()
    ds_finetune.export_model(folder / "hub", folder / "out", dtype="fp32", verify=False)
    command = [python, str(ROOT / "tests" / "export" / "mlx_worker.py"), str(folder / "out"), str(TOKENS)]
    done = subprocess.run(command, input=json.dumps(PROMPTS), capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        return done.stderr[-2000:], False, math.inf
    tokens, log_probs = json.loads(done.stdout.splitlines()[-1])
    expected = [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    are_equal = tokens == [ids for ids, _ in expected]
    difference = torch.tensor(log_probs).double() - torch.cat([logs for _, logs in expected])
    return "", are_equal, float(difference.abs().max()) if are_equal else math.inf


@pytest.mark.parametrize("family", types_of("export/test_mlx.py"))
def test_tokens_of_mlx_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "olmoe", ("olmoe", {}))
    error, are_equal, difference = run_mlx(family, tmp_path)
    assert (error, are_equal) == ("", True)
    assert difference < LARGEST


V3 = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {**V3, "rope_parameters": PLAIN}),
        ("deepseek_v3", {**V3, "rope_parameters": PLAIN, "q_lora_rank": None, "norm_topk_prob": False}),
        ("deepseek_v32", {"index_topk": 64}),
        ("mistral", {"sliding_window": 64}),
        ("phi3", {"sliding_window": None}),
        ("qwen2", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    ],
)
def test_log_probabilities_of_other_settings_are_equal(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "changed", (family, changes))
    error, are_equal, difference = run_mlx("changed", tmp_path)
    assert (error, are_equal) == ("", True)
    assert difference < LARGEST


@pytest.mark.parametrize(
    ("family", "changes", "fails"),
    [
        ("mixtral", {"head_dim": 24}, "Expected shape"),
        ("qwen3", {"attention_bias": True}, "parameters not in model"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "Missing 1 parameters"),
        ("deepseek_v2", {}, "has no attribute 'get'"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, ""),
        ("deepseek_v3", {"rope_interleave": False}, ""),
        ("deepseek_v32", {"index_topk": 8}, ""),
        ("mistral", {"sliding_window": 8}, ""),
        ("phi3", {"sliding_window": 8}, ""),
        ("llama", {"hidden_act": "gelu"}, ""),
        ("olmoe", {"clip_qkv": 0.5}, ""),
        ("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 1.3}}, ""),
    ],
)
def test_mlx_fails_or_differs_as_the_page_says(
    family: str, changes: dict[str, Any], fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "changed", (family, changes))
    error, _, difference = run_mlx("changed", tmp_path)
    if fails:
        assert fails in error
    else:
        assert not error
        assert difference > LARGEST
