"""What layers with a state, and attention in both directions, are not trained with is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.sampling.answer_model import check_cache
from ds_finetune.errors import FinetuneError, ModelError
from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
from ds_finetune.plan import plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, hf_config, run_tree
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model, with_chunked_loss
from tests.checking import check, settings_of


def _run(**sections: Any) -> RunConfig:
    tree = run_tree(Cell("qwen3_next", 1, 1, packing=True), Path("none"), Path("out"), dp=1)
    return RunConfig.model_validate(tree | sections)


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_that_does_not_reset_the_state(attention: str) -> None:
    with pytest.raises(FinetuneError, match="whose layers have a state: documents of a packed row would see") as caught:
        plan_model(hf_config("qwen3_next"), RunSettings.of(_run(model={"path": "none", "attention": attention})))
    assert caught.value.hint == "set model.attention: sdpa"


def test_muon_cannot_work_with_convolutions() -> None:
    run = settings_of(_run(optim={"name": "Muon"}), model_json=hf_config("qwen3_5_text").to_dict())
    with pytest.raises(FinetuneError, match="cannot work with convolutions, which model_type qwen3_5_text has"):
        check(run, "experts of the model")


def test_answers_are_not_sampled() -> None:
    lm = build_skeleton(hf_config("qwen3_5_text"), attention="sdpa", dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="answers of model_type `qwen3_5_text` cannot be sampled: it has linear_att"):
        check_cache(SimpleNamespace(lm=lm))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "value"), [("gemma3_text", True), ("gemma4_text", "all")])
def test_attention_in_both_directions(kind: str, value: Any, tmp_path: Path) -> None:
    tree = hf_config(kind).to_dict() | {"use_bidirectional_attention": value}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=f"use_bidirectional_attention is {value!r}: a token"):
        read_hf_config(str(tmp_path))


def test_a_soft_cap_takes_the_chunked_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernel of the loss has a soft cap too, which Triton's interpreter cannot run."""
    monkeypatch.setattr(plan, "installed_version", lambda _: plan.LIGER)
    monkeypatch.setattr(plan, "triton_problem", lambda: ("", ""))
    model = plan_model(hf_config("gemma4_text"), RunSettings.of(_run()))
    for name, is_refused in (("auto", False), ("liger", True)):
        run = RunSettings.of(_run(model={"path": "none", "loss": name}))
        made = plan.make_plan(run, world=World(0, 1, 0, 1, "a test"), device="cuda")
        assert made.loss_kernel == "liger"
        if is_refused:
            with pytest.raises(FinetuneError, match=r"model\.loss liger with the soft cap 2 of model_type gemma4_text"):
                with_chunked_loss(made, model)
        else:
            assert with_chunked_loss(made, model).loss_kernel == "chunked"
