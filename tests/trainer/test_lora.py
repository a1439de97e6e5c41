"""A whole run with adapters: what is announced, exported, written for peft, and refused."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.cli.main import main
from tests.lora_twin import in_peft
from tests.running import metrics, start, tiny_task, torchrun

LORA = {"rank": 8, "alpha": 16}


def task(folder: Path, **sections: Any) -> Path:
    """The tiny task on weights that are there, with adapters."""
    run_file = tiny_task(folder, **({"lora": LORA} | sections))
    tree = yaml.safe_load(run_file.read_text())
    tree["model"] = str(folder / "model")
    run_file.write_text(yaml.safe_dump(tree))
    kept = (folder / "model" / "config.json").read_text()
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).float().save_pretrained(
        folder / "model"
    )
    (folder / "model" / "config.json").write_text(kept)
    return run_file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("lora-run")
    run_file = task(
        folder,
        deepspeed={"zero_optimization": {"stage": 3}},
        train={"activation_checkpointing": "full"},
        data={"packing": True},
        optim={"lr": 0.02},
        eval={"keep_best": True, "generate": {"prompts": 2, "max_new_tokens": 4}},
    )
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def _alone(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "ds_finetune/train.py", str(folder / "run.yaml"), *overrides]


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits  # type: ignore[no-any-return]


def _plain(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    return model.eval()


def test_the_plan_says_what_is_adapted(finished: tuple[Path, str]) -> None:
    rows = dict(
        line.strip().split("  ", 1) for line in finished[1].splitlines() if " modules" in line or "are trained" in line
    )
    assert {name: text.split(" modules")[0].strip() for name, text in rows.items() if "modules" in text} == {
        "attention": "10 of 10",
        "dense MLP": "3 of 3",
        "shared experts": "3 of 3",
        "routed experts": "1 of 1",
        "router": "none of 1",
    }
    adapter = load_file(finished[0] / "run" / "adapter" / "adapter_model.safetensors")
    assert f"{sum(tensor.numel() for tensor in adapter.values()):,} parameters are trained" in rows["lora"]


def test_the_export_is_base_and_adapter_as_peft_adds_them(finished: tuple[Path, str]) -> None:
    folder, run = finished[0], finished[0] / "run"
    merged, base = _plain(run / "export"), _plain(folder / "model")
    before = _logits(base)
    together = _logits(in_peft(base, run / "adapter").eval())
    assert (together - before).abs().max() > 1e-2, "the adapter does nothing"
    assert torch.allclose(_logits(merged), together, atol=1e-5, rtol=0)
    assert (run / "adapter-best" / "adapter_config.json").is_file()
    assert (run / "export-best" / "config.json").is_file()


@pytest.mark.parametrize("source", ["run", "run/adapter"])
def test_what_is_exported_later_is_the_export_of_the_run(
    source: str, finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder = finished[0]
    assert main(["export", str(folder / source), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    wanted, found = (load_file(where / "model.safetensors") for where in (folder / "run" / "export", tmp_path / "out"))
    assert wanted.keys() == found.keys()
    assert all(torch.allclose(found[key], tensor, atol=1e-6, rtol=0) for key, tensor in wanted.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_another_base_is_refused(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished[0]
    other = Path(shutil.copytree(folder / "model", tmp_path / "other"))
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(other)).float().save_pretrained(other)
    for source in ("run", "run/adapter"):
        assert main(["export", str(folder / source), str(tmp_path / "out"), "--base", str(other)]) == 2
        assert "was trained from weights with digest" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_and_number_of_ranks_but_not_with_other_adapters(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished[0], tmp_path / "copy"))
    text = (folder / "run.yaml").read_text().replace(str(finished[0]), str(folder))
    (folder / "run.yaml").write_text(text)
    refused = start(_alone(folder, "lora.rank=16", "train.for=4 steps"))
    assert refused.returncode == 2
    assert "lora.rank 8 -> 16" in refused.stdout + refused.stderr
    went_on = start(_alone(folder, "deepspeed.zero_optimization.stage=2", "train.for=4 steps"))
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "sp", "ep", "pp"])
def test_a_run_of_ranks_with_parts_of_the_model_exports_the_same_and_resumes(axis: str, tmp_path: Path) -> None:
    """Two runs of the same rows: ranks with parts of the model, and one rank that resumes in the middle of it."""
    run_file = task(tmp_path, parallel={axis: 2}, deepspeed={"zero_optimization": {"stage": 1}}, optim={"lr": 0.02})
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    merged = load_file(run / "export" / "model.safetensors")
    base = _plain(tmp_path / "model")
    before = _logits(base)
    together = _logits(in_peft(base, run / "adapter").eval())
    assert (together - before).abs().max() > 1e-2, "the adapter does nothing"
    assert torch.allclose(_logits(_plain(run / "export")), together, atol=1e-5, rtol=0)
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    later = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.allclose(later[key], tensor, atol=1e-6, rtol=0) for key, tensor in merged.items())
    losses = [record["train/loss"] for record in metrics(tmp_path)]
    alone = task(tmp_path / "alone", deepspeed={"zero_optimization": {"stage": 2}}, optim={"lr": 0.02})
    done = start([sys.executable, "ds_finetune/train.py", str(alone)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses == pytest.approx([record["train/loss"] for record in metrics(tmp_path / "alone")], abs=1e-5)
    went_on = start(_alone(tmp_path, f"parallel.{axis}=1", "train.for=4 steps"))
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3, 4]


def test_what_is_not_proven_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run_file = str(task(tmp_path))
    for override, said in (
        ("lora.target_modules=[q_prj]", "`q_prj` matches no module"),
        ("lora.target_modules=[lm_head]", "experts, gate_proj"),
        ("lora.target_modules=[experts, '(']", "is not a regular expression"),
        ("lora.rnk=4", "did you mean `rank`?"),
        ("lora.rank=4", "not a multiple of 8"),
        ("model.weights=random", "lora with model.weights random is not tested"),
        ("optim.name=Lion", "lora with optim.name Lion is not tested"),
        ("train.precision=fp16", "fp16"),
    ):
        assert main(["train", run_file, override]) == 2, override
        assert said in capsys.readouterr().err, override
    assert not (tmp_path / "run").exists()
