"""`model.context` against transformers' own rotary embeddings, in every family, and in what a run exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.export.model_config import served_config
from ds_finetune.families.table import BUILT_AS, WITH_CONTEXT, family_of
from ds_finetune.foreign.auto_configs import AutoConfig as OwnConfig
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.inputs import config_tree
from ds_finetune.trainer.resolve import make_model_plan, model_config, token_limits
from tests.model.tiny import CONFIGS
from tests.running import metrics, start, tiny_task

POSITIONS, CONTEXT = 32, 128
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def run_of(folder: Path, context: int | None, **train: Any) -> RunConfig:
    tree = {
        "model": {"path": str(folder), "weights": "random", "context": context},
        "data": {"train": "train.jsonl"},
        "train": {"precision": "fp32", "max_seq_len": 16} | train,
        "output_dir": "run",
    }
    return RunConfig.model_validate(tree)


def planned(folder: Path, context: int) -> ModelPlan:
    config = run_of(folder, context)
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    return make_model_plan(RunSettings.of(config, mesh=plan.mesh))


def logits(config: Any, weights: dict[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a row of `CONTEXT` tokens, by transformers' eager attention."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        return model(torch.arange(CONTEXT)[None] % 90).logits, dict(model.state_dict())


@pytest.mark.parametrize("family", WITH_CONTEXT)
def test_every_family_gets_the_positions_of_transformers(family: str, tmp_path: Path) -> None:
    _compare(family, None if WITH_CONTEXT.index(family) % 2 else YARN, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_CONTEXT)
def test_every_family_gets_them_from_the_other_scaling(family: str, tmp_path: Path) -> None:
    _compare(family, YARN if WITH_CONTEXT.index(family) % 2 else None, tmp_path)


def _compare(family: str, rope: dict[str, Any] | None, tmp_path: Path) -> None:
    # transformers writes into the dict that it is given.
    rope = None if rope is None else dict(rope)
    published = CONFIGS[family] | {"model_type": family, "max_position_embeddings": POSITIONS}
    published |= {} if rope is None else {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    published |= {"rope_parameters": rope} if rope is not None and "rope_parameters" in published else {}
    if family == "gpt_oss" and rope is None:
        published |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    # transformers cannot build a Mixtral with YaRN whose config.json has no head_dim.
    published |= {"head_dim": 8} if family == "mixtral" and rope is not None else {}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = planned(tmp_path, CONTEXT)
    original = POSITIONS if rope is None else 16
    theta = model.hf_config.rope_parameters["rope_theta"]
    partial = model.hf_config.rope_parameters.get("partial_rotary_factor")
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0} if rope is None and "kv_lora_rank" in published else {}
    by_hand = {"rope_type": "yarn", "rope_theta": theta, "factor": CONTEXT / original, **scales, **(rope or {})}
    by_hand |= {"factor": CONTEXT / original, "original_max_position_embeddings": original}
    by_hand |= {} if partial is None else {"partial_rotary_factor": partial}
    kind = BUILT_AS.get(family, family)
    changes: dict[str, Any] = {"max_position_embeddings": CONTEXT, "rope_parameters": by_hand}
    changes |= {"head_dim": 8} if family == "mixtral" else {}
    wanted, weights = logits(AutoConfig.for_model(kind, **CONFIGS[family] | changes))
    found, _ = logits(model.hf_config, weights)
    assert torch.equal(found, wanted)
    without, _ = logits(OwnConfig.from_pretrained(tmp_path), weights)
    assert (found - without).abs().max() > 1e-3
    served = served_config(config_tree(tmp_path, model), family_of(family), [])
    for key in ("rope_parameters", "rope_scaling"):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in served.items() if k != key}))
        read = OwnConfig.from_pretrained(tmp_path)
        assert read.max_position_embeddings == CONTEXT
        assert torch.equal(logits(read, weights)[0], wanted), key


def test_without_the_key_the_configuration_is_the_published_one(tmp_path: Path) -> None:
    published = CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3", "max_position_embeddings": POSITIONS}
    (tmp_path / "config.json").write_text(json.dumps(published))
    fits = planned(tmp_path, POSITIONS)
    assert config_tree(tmp_path, fits) == published
    config = run_of(tmp_path, None)
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    assert config_tree(tmp_path, make_model_plan(RunSettings.of(config, mesh=plan.mesh))) == published
    assert fits.hf_config.rope_parameters["rope_type"] == "default"


def test_rows_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    published = CONFIGS["llama"] | {"model_type": "llama", "max_position_embeddings": POSITIONS}
    (tmp_path / "config.json").write_text(json.dumps(published))
    for context, max_seq_len, said in (
        (None, 33, "max_seq_len 33 is more than the 32 positions"),
        (64, 65, r"max_seq_len 65 is more than model\.context 64"),
        (16, 17, r"max_seq_len 17 is more than model\.context 16"),
    ):
        config = run_of(tmp_path, context, max_seq_len=max_seq_len)
        with pytest.raises(ConfigError, match=said) as caught:
            token_limits(RunSettings.of(config), model_config(RunSettings.of(config)))
        assert "model.context" in str(caught.value.hint)


def test_adapters_are_refused(tmp_path: Path) -> None:
    tree = run_of(tmp_path, 64).model_dump(by_alias=True) | {"lora": {"rank": 8}}
    tree["model"]["weights"] = "load"
    with pytest.raises(ConfigError, match=r"lora with model\.context 64 is not tested"):
        make_plan(RunSettings.of(RunConfig.model_validate(tree)), world=World(0, 1, 0, 1, "a test"), device="cpu")


def test_a_run_exports_the_configuration_that_it_trained(tmp_path: Path) -> None:
    """A run with rows beyond the published positions; its export and its checkpoint give transformers one function."""
    run_file = tiny_task(
        tmp_path / "t",
        model={"weights": "random", "context": 1024},
        data={"packing": True},
        train={"for": "1 steps", "max_seq_len": 640, "global_batch_size": 1, "micro_batch_size": 1},
    )
    done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert "512 -> 1024 positions, no scaling -> YaRN factor 2" in said
    assert "YaRN applies at every length" in said
    assert len(metrics(run_file.parent)) == 1
    folder = run_file.parent / "run"
    export_checkpoint(folder, tmp_path / "again", dtype="fp32", max_shard_bytes=10**9, base=None)
    exports = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder / "export", tmp_path / "again")]
    ids = torch.arange(800)[None] % 90
    with torch.no_grad():
        ended, again = (model(ids).logits for model in exports)
    assert torch.equal(ended, again)
    for model in exports:
        assert model.config.max_position_embeddings == 1024
        assert model.config.rope_parameters["factor"] == 2.0
        assert model.config.rope_parameters["original_max_position_embeddings"] == 512
