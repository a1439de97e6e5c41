"""A whole run over weights in four bits: announced, evaluated, exported from the model's own weights, resumed, and
refused.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import ds_finetune.plan.checks as checks
from ds_finetune.cli.main import main
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.verify.record import UNVERIFIED, ExportRecord
from tests.lora_twin import in_peft
from tests.running import metrics, start, tiny_task, torchrun

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra `quantize`)")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32}


def _task(folder: Path) -> Path:
    sections = {"optim": {"lr": 0.02}, "eval": {"every": "1 steps", "keep_best": False}, "export": {"verify": True}}
    run_file = tiny_task(
        folder, lora={"rank": 8, "alpha": 16, "quantize": "nf4"}, checkpoint={"every": "1 steps", "keep": 9}, **sections
    )
    tree = yaml.safe_load(run_file.read_text()) | {"model": str(folder / "model")}
    run_file.write_text(yaml.safe_dump(tree))
    config = AutoConfig.from_pretrained(folder / "model", **WIDE)
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "model")
    return run_file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("qlora-run")
    done = start(torchrun("ds_finetune/train.py", str(_task(folder))))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits  # type: ignore[no-any-return]


def test_the_plan_says_what_is_in_four_bits(finished: tuple[Path, str]) -> None:
    text = " ".join(finished[1].split())
    assert "frozen in nf4" in text
    assert "routed experts'" in text


def test_the_export_is_the_model_in_full_width_and_the_adapter(finished: tuple[Path, str]) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    folder, run = finished[0], finished[0] / "run"
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before, together = _logits(base), _logits(in_peft(base, run / "adapter"))
    assert (together - before).abs().max() > 1e-2, "the adapter does nothing"
    merged = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    assert torch.allclose(_logits(merged), together, atol=1e-5, rtol=0)
    untouched = "model.layers.1.mlp.gate.weight"
    assert torch.equal(
        merged.state_dict()[untouched], AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()[untouched]
    )


def test_the_record_holds_no_logits_of_other_weights(finished: tuple[Path, str]) -> None:
    run = finished[0] / "run"
    record = ExportRecord.read(run / "export")
    assert (run / "export" / RECORD).is_file()
    assert record.logits is None
    assert record.digests
    assert not (run / "export" / UNVERIFIED).exists()
    assert "there are no logits of the run to compare them with" in " ".join(finished[1].split())


def test_a_checkpoint_is_exported_alike(finished: tuple[Path, str], tmp_path: Path) -> None:
    run = finished[0] / "run"
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    wanted, found = (load_file(where / "model.safetensors") for where in (run / "export", tmp_path / "out"))
    assert wanted.keys() == found.keys()
    assert all(torch.allclose(found[key], tensor, atol=1e-6, rtol=0) for key, tensor in wanted.items())


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    """From step 2 on, evaluated after each step: the losses are those of the run that was not interrupted."""
    folder = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text().replace(str(finished[0]), str(folder)))
    wanted = metrics(folder)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000003")
    command = [sys.executable, "ds_finetune/train.py", str(folder / "run.yaml")]
    refused = start([*command, "lora.quantize=null"])
    assert refused.returncode == 2
    assert "lora.quantize 'nf4' -> None" in " ".join((refused.stdout + refused.stderr).split())
    done = start(torchrun("ds_finetune/train.py", str(folder / "run.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr
    found = metrics(folder)
    assert [record["step"] for record in found] == [1, 2, 3]
    assert found[-1]["train/loss"] == wanted[-1]["train/loss"]
    assert found[-1]["eval/loss"] == wanted[-1]["eval/loss"]


def test_what_is_not_proven_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run_file = str(_task(tmp_path))
    for override, said in (
        (
            "deepspeed.zero_optimization.offload_optimizer={device: cpu}",
            "lora.quantize nf4 with offload to cpu is not tested",
        ),
        ("lora.quantize=fp4", "quantize"),
        ("train.precision=fp16", "fp16"),
    ):
        assert main(["train", run_file, override]) == 2, override
        assert said in capsys.readouterr().err, override
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert main(["train", run_file]) == 2
    assert "lora.quantize nf4 needs bitsandbytes, which is not installed" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
