"""Plans follow from the tensors that a model's own modules have, also those of a family that another package adds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.cli.main import main
from ds_finetune.config.sections import LoraConfig
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.skeleton import build_skeleton, full_fragment
from ds_finetune.plan.lora_targets import adapted_targets, targets_of
from tests.described import described_tree
from tests.model.tiny import CONFIGS
from tests.plan.toys import toys_registered


@pytest.fixture
def gated() -> Iterator[dict[str, Any]]:
    """config.json of a family that is in no table of this package."""
    with toys_registered():
        yield {"model_type": "gated_llama", **CONFIGS["llama"], "num_hidden_layers": 4}


def plan_of(folder: Path, model: dict[str, Any], *options: str) -> int:
    """Exit code of `plan` of a run of the model whose config.json is given, on two GPUs."""
    (folder / "config.json").write_text(json.dumps(model))
    run = {"model": str(folder), "data": {"train": "t.jsonl", "cache_dir": str(folder / "cache")}}
    run |= {"output_dir": "o", "train": {"global_batch_size": 8, "max_seq_len": 32, "precision": "bf16"}}
    (folder / "run.yaml").write_text(json.dumps(run | {"deepspeed": {"zero_optimization": {"stage": 1}}}))
    return main(["plan", str(folder / "run.yaml"), "--gpus", "2", "--gpu", "h100-80g", *options])


def test_a_family_of_another_package_is_planned(
    tmp_path: Path, gated: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**gated))
    assert plan_of(tmp_path, gated, "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["num_bytes"] for row in tree["memory"]["rows"]}
    assert rows["weights"] == 2 * lm.num_parameters()
    assert plan_of(tmp_path, gated, "--json", "lora.rank=8", "lora.target_modules=[g_proj]") == 0
    tree, hidden = json.loads(capsys.readouterr().out), gated["hidden_size"]
    moments = {row["name"]: row["num_bytes"] for row in tree["memory"]["rows"]}["moments"]
    assert moments == 8 * 4 * 8 * (hidden + 3 * hidden) / 2, "two in fp32 of a number, of four adapters, on two ranks"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"pad_token_id": 100_000},
            "a model of model_type `llama` cannot be built from its config.json: AssertionError: Padding_idx must be "
            "within num_embeddings",
        ),
        ({"hidden_size": 66}, "The hidden size (66) is not a multiple of the number of attention heads (4)"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_error(
    changed: dict[str, int], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {name: value for name, value in CONFIGS["llama"].items() if name != "head_dim"}
    assert plan_of(tmp_path, {"model_type": "llama", **tree, **changed}) == 2
    shown = capsys.readouterr().err.splitlines()
    errors = [line for line in shown if line.startswith("error: ")]
    assert len(errors) == 1, shown
    assert message in errors[0]
    assert sum("hint: " in line for line in shown) == 1


@pytest.mark.parametrize(
    ("pattern", "trained"), [(r"model\.layers\.[0-9]\.self_attn\.q_proj", 819_200), (".*", 235_311_104)]
)
def test_adapters_by_a_pattern_are_those_that_are_installed(pattern: str, trained: int, shared_data: Path) -> None:
    tree = json.loads((shared_data / "configs" / "deepseek-ai--DeepSeek-V2-Lite" / "config.json").read_text())
    hf_config, lora = AutoConfig.for_model(**tree), LoraConfig(rank=16, target_modules=(pattern,))
    with fake_tensors():
        lm = build_skeleton(hf_config, attention="sdpa", dtype=torch.bfloat16, device="cpu")
        install_lora(lm, plan_lora(hf_config, lora).targets, lora, seed=0, placement=AdapterPlacement(full_fragment))
    assert sum(param.numel() for param in lm.parameters() if param.requires_grad) == trained
    planned = adapted_targets(targets_of(described_tree(tree).tensors), lora)
    assert sum(target.num_params(lora.rank) for target in planned) == trained
