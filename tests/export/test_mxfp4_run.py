"""A run from a folder in MXFP4: trained in bf16, exported without the quantisation, verified and reloaded."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.export.verify.record import UNVERIFIED
from tests.model.fp8_folder import read_all
from tests.model.mxfp4_folder import publish_gpt_oss
from tests.running import metrics, start, tiny_task


@pytest.mark.slow
def test_a_run_from_mxfp4_is_exported_in_bf16(tmp_path: Path) -> None:
    run_file = tiny_task(
        tmp_path,
        model={"path": str(tmp_path / "mxfp4"), "weights": "load"},
        train={"precision": "bf16"},
        data={"packing": True},
        optim={"lr": 1e-3},
        export={"verify": True},
    )
    publish_gpt_oss(tmp_path / "mxfp4", vocab_size=128)
    for file in (tmp_path / "model").glob("token*"):
        shutil.copyfile(file, tmp_path / "mxfp4" / file.name)
    done = start([sys.executable, "ds_finetune/train.py", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [record["train/loss"] for record in metrics(tmp_path)]
    assert losses[-1] < losses[0]
    out = tmp_path / "run" / "export"
    assert not (out / UNVERIFIED).exists()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert {tensor.dtype for tensor in read_all(out).values()} == {torch.bfloat16}
    model, loading = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.state_dict().keys() == read_all(out).keys()
    assert model(torch.arange(5, 25)[None]).logits.isfinite().all()
