"""Runs that train a multi-token prediction layer: metrics, resume, exports, what servers read, and bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import ModelConfig, MtpConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.table import family_of
from ds_finetune.features.mtp import plan_mtp
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.model.weights.load import open_weights
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import complete_features
from tests.json_files import change_json
from tests.parity.mtp_cells import write_mtp_model
from tests.planning import model_of
from tests.running import metrics, resume_on_two_ranks, tiny_task

LAYER = "model.layers.2."
LEARNING = {"lr": 1e-2, "warmup": "0%", "min_lr_ratio": 1.0, "weight_decay": 0.1}


def _run_file(folder: Path, **sections: Any) -> Path:
    run_file = tiny_task(
        folder,
        **{"optim": LEARNING, "mtp": {"train": True}, "train": {"for": "4 steps"}, "eval": {"every": "2 steps"}}
        | sections,
    )
    config = folder / "model" / "config.json"
    change_json(config, {"num_nextn_predict_layers": 1})
    return run_file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed after two of its four steps, on two ranks with ZeRO-3."""
    folder = tmp_path_factory.mktemp("run")
    resume_on_two_ranks(_run_file(folder), printed=folder / "printed.txt")
    return folder


def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, export={"at_end": False})
    train(read_config(run_file))
    wanted, found = metrics(tmp_path), metrics(finished)
    for name in ("train/loss", "train/mtp_loss", "train/mtp_accuracy", "train/grad_norm"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in wanted], rel=1e-4), name
    assert found[-1]["eval/mtp_loss"] == pytest.approx(wanted[-1]["eval/mtp_loss"], rel=1e-4)
    assert 0 <= found[-1]["eval/mtp_accuracy"] <= 1
    assert found[-1]["train/mtp_loss"] < found[0]["train/mtp_loss"]


def test_plan_says_what_is_trained(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text()
    assert "layer 2 is trained with weight 0.1; its loss trains only this layer" in printed


def test_the_export_has_the_layer_under_its_published_names(finished: Path, tmp_path: Path) -> None:
    export = finished / "run" / "export"
    tensors = load_file(export / "model.safetensors")
    names = {key.removeprefix(LAYER) for key in tensors if key.startswith(LAYER)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= names
    assert {"mlp.experts.0.gate_proj.weight", "mlp.gate.e_score_correction_bias"} <= names
    config = json.loads((export / "config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    assert main(["export", str(finished / "run"), str(tmp_path / "out"), "--no-verify", "--dtype", "fp32"]) == 0
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


def test_drafts_of_plain_transformers_change_no_answer(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 finds the layer by a pattern with the number of DeepSeek-V3's own."""
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])
    model = AutoModelForCausalLM.from_pretrained(finished / "run" / "export", dtype=torch.float32).eval()
    prompt = torch.tensor([[0, 3, 40, 41, 42, 4]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 2}
    greedy = model.generate(prompt, **options)
    assert greedy.shape[1] > prompt.shape[1]
    assert torch.equal(model.generate(prompt, use_mtp=True, **options), greedy)


@pytest.mark.slow
def test_an_export_is_trained_on(finished: Path, tmp_path: Path) -> None:
    """Its layer is loaded by its published names, so a learning rate of nearly 0 changes nothing."""
    run_file = _run_file(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(finished / "run" / "export" / name, tmp_path / "model" / name)
    changes = ["model.weights=load", "train.for=1 steps", "optim.lr=1e-12"]
    train(read_config(run_file, changes))
    before, after = (load_file(folder / "run" / "export" / "model.safetensors") for folder in (finished, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-9, rtol=0) for name in before)
    assert metrics(tmp_path)[0]["train/mtp_loss"] < metrics(finished)[0]["train/mtp_loss"]


def _tree(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    return {"model": str(tmp_path), "data": {"train": "none.jsonl"}, "output_dir": str(tmp_path)} | {
        "mtp": {"train": True},
        "deepspeed": {"zero_optimization": {"stage": 1}},
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"indexer": {"train": True}}, "mtp.train true with indexer.train true is not tested"),
        ({"objective": "dpo"}, "mtp.train true with objective dpo is not tested"),
        ({"optim": {"name": "Muon"}}, "mtp.train true with optim.name Muon is not tested"),
        ({"train": {"precision": "fp16"}}, "mtp.train true with train.precision fp16 is not tested"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 0}}},
            "mtp.train true with zero stage 0 in bf16 is not tested",
        ),
        (
            {"model": {"path": "m", "resize_vocabulary": True}},
            "mtp.train true with model.resize_vocabulary true is not tested",
        ),
        (
            {"model": {"path": "m", "attention": "flash_attention_2"}},
            "mtp.train true with model.attention flash_attention_2 is not tested",
        ),
    ],
)
def test_untested_settings_are_refused(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = RunConfig.model_validate(_tree(tmp_path, **sections))
    with pytest.raises(ConfigError, match=said) as refused:
        make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    assert refused.value.hint


def test_a_frozen_router_is_frozen_in_the_layer_too(tmp_path: Path) -> None:
    write_mtp_model("deepseek_v3", tmp_path / "m")
    sections = {"model": str(tmp_path / "m"), "router": {"train": False}}
    config = RunConfig.model_validate(_tree(tmp_path, **sections))
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    gates = [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)]
    assert list(complete_features(plan, model_of(config)).frozen) == gates


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r".*layers\.[01]\..*o_proj", r"no adapter is in the multi-token prediction layer, model\.layers\.2"),
        (
            "eh_proj",
            r"all adapters are in the multi-token prediction layer, model\.layers\.2, so the objective trains",
        ),
    ],
)
def test_adapters_on_one_side_only_are_refused(pattern: str, said: str, tmp_path: Path) -> None:
    write_mtp_model("deepseek_v3", tmp_path / "m")
    sections = {"model": str(tmp_path / "m"), "lora": {"target_modules": [pattern]}}
    with pytest.raises(ConfigError, match=said) as refused:
        model_of(RunConfig.model_validate(_tree(tmp_path, **sections)))
    assert refused.value.hint


def test_adapters_of_the_layer_are_merged(tmp_path: Path) -> None:
    """At the end of a run and later, from its checkpoint and from its adapter folder."""
    run_file = _run_file(tmp_path, lora={"rank": 8}, model={"weights": "load"}, train={"for": "2 steps"}, eval={})
    base, run = tmp_path / "model", tmp_path / "run"
    write_mtp_model("deepseek_v3", tmp_path / "drawn", sizes={"vocab_size": 128})
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "drawn" / name, base / name)
    train(read_config(run_file))
    before, after = load_file(base / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name.removeprefix(LAYER) for name in before if not torch.equal(before[name], after[name])}
    assert {"eh_proj.weight", "self_attn.o_proj.weight", "mlp.experts.0.down_proj.weight"} <= changed
    assert not {"enorm.weight", "shared_head.norm.weight", "mlp.gate.weight"} & changed
    for number, source in enumerate((run, run / "adapter")):
        out = tmp_path / f"out-{number}"
        assert main(["export", str(source), str(out), "--base", str(base), "--no-verify", "--dtype", "fp32"]) == 0
        later = load_file(out / "model.safetensors")
        assert later.keys() == after.keys()
        assert all(torch.equal(later[name], tensor) for name, tensor in after.items())


def _refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as refused:
        plan_mtp(read_hf_config(str(folder)), ModelConfig(path=str(folder)), MtpConfig(train=True))
    return refused.value


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    write_mtp_model("deepseek_v3", tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    tree = json.loads(config.read_text())
    for number, tensors in ((0, "num_nextn_predict_layers 0"), (2, "num_nextn_predict_layers 2")):
        config.write_text(json.dumps(tree | {"num_nextn_predict_layers": number}))
        assert tensors in _refusal(tmp_path / "m").message
    config.write_text(json.dumps({key: value for key, value in tree.items() if key != "num_nextn_predict_layers"}))
    assert "num_nextn_predict_layers 0" in _refusal(tmp_path / "m").message
    config.write_text(json.dumps(tree | {"num_hidden_layers": 1}))
    assert "has no tensor `model.layers.1.eh_proj.weight`" in _refusal(tmp_path / "m").message
    config.write_text(json.dumps(tree | {"tie_word_embeddings": True}))
    assert "tie_word_embeddings true" in _refusal(tmp_path / "m").message
    config.write_text(json.dumps(tree | {"model_type": "llama"}))
    assert "model_type llama, with which mtp.train is not tested" in _refusal(tmp_path / "m").message


def test_a_layer_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    """The model's head would be trained with it."""
    write_mtp_model("deepseek_v3", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{LAYER}shared_head.head.weight"] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    hf_config = read_hf_config(str(tmp_path / "m"))
    plan_mtp(hf_config, ModelConfig(path=str(tmp_path / "m")), MtpConfig(train=True))
    said = "would use `lm_head.weight` instead of `model.layers.2.shared_head.head.weight`, but the two differ in"
    with pytest.raises(ModelError, match=said):
        open_weights(build_meta_model(hf_config), tmp_path / "m", family=family_of("deepseek_v3"))
