"""Whole runs with options of adapters: exported, trained further from the adapter's folder, and refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.cli.main import main
from tests.json_files import change_json
from tests.lora_twin import in_peft
from tests.running import start
from tests.trainer.test_lora import LORA, task

OPTIONS: dict[str, Any] = {**LORA, "rslora": True, "modules_to_save": ["lm_head", r".*\.0\.input_layernorm"]}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process are those of one rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, and in `next` a run file that trains its adapter further."""
    folder = tmp_path_factory.mktemp("lora-options")
    run_file = task(folder, lora=OPTIONS, optim={"lr": 0.02}, deepspeed={"zero_optimization": {"stage": 2}})
    done = start([sys.executable, "ds_finetune/train.py", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    tree = yaml.safe_load(run_file.read_text())
    tree["lora"]["start"], tree["output_dir"] = str(folder / "run" / "adapter"), str(folder / "next")
    (folder / "next.yaml").write_text(yaml.safe_dump(tree))
    return folder


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits  # type: ignore[no-any-return]


def _plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _same(first: Path, second: Path) -> bool:
    found, wanted = (load_file(folder / "model.safetensors") for folder in (first, second))
    return found.keys() == wanted.keys() and all(
        torch.allclose(found[name], tensor, atol=1e-6, rtol=0) for name, tensor in wanted.items()
    )


def test_peft_computes_the_export_from_base_and_adapter(finished: Path, tmp_path: Path) -> None:
    base = _plain(finished / "model")
    before = {name: param.detach().clone() for name, param in base.named_parameters()}
    together = _logits(in_peft(base, finished / "run" / "adapter"))
    exported = _plain(finished / "run" / "export")
    assert torch.allclose(_logits(exported), together, atol=1e-5, rtol=0)
    moved = {name for name, param in exported.named_parameters() if not torch.equal(param, before[name])}
    assert {"lm_head.weight", "model.layers.0.input_layernorm.weight"} <= moved
    assert not {"model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"} & moved
    for number, source in enumerate(("run", "run/adapter")):
        assert main(["export", str(finished / source), str(tmp_path / str(number)), "--dtype", "fp32"]) == 0
        assert _same(tmp_path / str(number), finished / "run" / "export")


def test_training_begins_with_the_adapter_and_what_was_trained_whole(finished: Path) -> None:
    """With a rate of almost nothing the second run ends where the first one ended."""
    done = start([sys.executable, "ds_finetune/train.py", str(finished / "next.yaml"), "optim.lr=1e-12"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(finished / "run" / "adapter") in done.stdout
    assert _same(finished / "next" / "export", finished / "run" / "export")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.rank=16", "rank 8 of model.layers.0.mlp.down_proj.weight, lora.rank 16"),
        ("lora.alpha=99", "lora 35.0018"),
        ("lora.target_modules=[q_b_proj]", "adapters only in lora.start: model.layers.0.mlp.down_proj.weight"),
        ("lora.modules_to_save=[norm]", "weights trained whole only in lora: model.norm.weight"),
        ("lora.start=none", "none cannot be read as an adapter: it has no adapter_config.json and no "),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    override: str, said: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(finished / "next.yaml"), override, "checkpoint.resume=never"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_adapter_of_another_base_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(finished / "model", tmp_path / "other"))
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(other)).float().save_pretrained(other)
    shutil.copyfile(finished / "model" / "config.json", other / "config.json")
    overrides = [f"model={other}", f"output_dir={tmp_path / 'run'}"]
    assert main(["train", str(finished / "next.yaml"), *overrides]) == 2
    assert "was trained from weights with digest" in capsys.readouterr().err
    adapter = Path(shutil.copytree(finished / "run" / "adapter", tmp_path / "adapter"))
    change_json(adapter / "adapter_config.json", {"lora_alpha": 32})
    assert main(["train", str(finished / "next.yaml"), f"lora.start={adapter}", *overrides[1:]]) == 2
    assert "scale 11.3137" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_adapter_with_nan_is_refused_before_the_first_step(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = Path(shutil.copytree(finished / "run" / "adapter", tmp_path / "adapter"))
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    key = sorted(tensors)[0]
    tensors[key].view(-1)[0] = float("nan")
    save_file(tensors, adapter / "adapter_model.safetensors", metadata=metadata)
    overrides = [f"lora.start={adapter}", f"output_dir={tmp_path / 'run'}"]
    assert main(["train", str(finished / "next.yaml"), *overrides]) == 2
    printed = capsys.readouterr()
    assert f"tensor `{key}` of {adapter} holds NaN or infinity" in printed.err
    assert "step 1" not in printed.out
    assert "not known" not in printed.out, "memory is traced without the values of the adapter"


def test_settings_and_tensors_of_modules_to_save_that_disagree_are_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of lm_head, which peft would take from the base with a warning, or ignore: as a start and for an export."""
    adapter = Path(shutil.copytree(finished / "run" / "adapter", tmp_path / "adapter"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    head = {key: tensors[key] for key in tensors if "lm_head" in key}
    lacking = {key: tensors[key] for key in tensors if "input_layernorm" in key or "lora_" in key}
    layer = json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"]
    start_from = ["train", str(finished / "next.yaml"), f"lora.start={adapter}", f"output_dir={tmp_path / 'run'}"]
    for given, listed, modules, said in (
        (
            lacking,
            layer,
            "[.*.0.input_layernorm]",
            "lists lm_head in modules_to_save, but adapter_model.safetensors has no",
        ),
        (lacking | head, [name for name in layer if name != "lm_head"], "[]", "holds tensor base_model.model.lm_head"),
    ):
        save_file(given, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        change_json(adapter / "adapter_config.json", {"modules_to_save": listed})
        assert main([*start_from, f"lora.modules_to_save={modules}"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        exported = ["export", str(adapter), str(tmp_path / "out"), "--base", str(finished / "model")]
        assert main(exported) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lora.dropout=0.1", "lora.target_modules=[q_b_proj]", "train.tiled_mlp=true"], "train.tiled_mlp true"),
        (["lora.dropout=0.1"], "no dropout for adapters of down_proj, experts, gate_proj, up_proj"),
        (["lora.dropout=1"], "less than 1"),
        (["lora.modules_to_save=[q_a_layernorm]", "mtp.train=true"], "mtp.train true is not tested"),
    ],
)
def test_what_is_not_tested_is_refused(
    overrides: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(task(tmp_path)), *overrides]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
