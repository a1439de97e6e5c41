"""mlx_lm computes with safetensors folders what transformers does. On Linux: pip install 'mlx[cpu]' mlx-lm."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import ds_finetune
from tests.conftest import ROOT
from tests.export.cells import types_of
from tests.export.gguf.models import MODELS, greedy, save

TOKENS, PROMPTS = 36, ([5, 6, 7, 8], [3, 9, 10, 11, 12, 13], [20])


@pytest.mark.parametrize("family", types_of("export/test_mlx.py"))
def test_tokens_of_mlx_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = os.environ.get("DS_FINETUNE_MLX")
    if not python:
        pytest.skip("DS_FINETUNE_MLX names no Python of an environment with mlx_lm")
    monkeypatch.setitem(MODELS, "olmoe", ("olmoe", {}))
    model = save(family, tmp_path / "hub").eval()
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", dtype="fp32", verify=False)
    command = [python, str(ROOT / "tests" / "export" / "mlx_worker.py"), str(tmp_path / "out"), str(TOKENS)]
    done = subprocess.run(command, input=json.dumps(PROMPTS), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [greedy(model, prompt, TOKENS)[0] for prompt in PROMPTS]
