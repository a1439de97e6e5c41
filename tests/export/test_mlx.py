"""mlx_lm computes with safetensors folders what transformers does. On Linux: pip install 'mlx[cpu]' mlx-lm."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ds_finetune
from tests.conftest import ROOT
from tests.export.cells import types_of
from tests.export.gguf.models import MODELS, greedy, save

TOKENS, PROMPTS = 36, ([5, 6, 7, 8], [3, 9, 10, 11, 12, 13], [20])


def tokens_of(name: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[list[int]]]:
    """mlx_lm's greedy tokens of an exported tiny model, and those of transformers."""
    python = os.environ.get("DS_FINETUNE_MLX")
    if not python:
        pytest.skip("DS_FINETUNE_MLX names no Python of an environment with mlx_lm")
    model = save(name, folder / "hub").eval()
    ds_finetune.export_model(folder / "hub", folder / "out", dtype="fp32", verify=False)
    command = [python, str(ROOT / "tests" / "export" / "mlx_worker.py"), str(folder / "out"), str(TOKENS)]
    done = subprocess.run(command, input=json.dumps(PROMPTS), capture_output=True, text=True, timeout=200, check=False)
    return done, [greedy(model, prompt, TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", types_of("export/test_mlx.py"))
def test_tokens_of_mlx_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "olmoe", ("olmoe", {}))
    done, expected = tokens_of(family, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize(
    ("family", "changes", "fails"),
    [
        ("mixtral", {"head_dim": 24}, "Expected shape"),
        ("deepseek_v2", {}, "has no attribute 'get'"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, ""),
        ("deepseek_v3", {"rope_interleave": False}, ""),
    ],
)
def test_mlx_fails_or_differs_as_the_page_says(
    family: str, changes: dict[str, Any], fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "changed", (family, changes))
    done, expected = tokens_of("changed", tmp_path)
    if fails:
        assert fails in done.stderr
    else:
        assert json.loads(done.stdout.splitlines()[-1]) != expected
