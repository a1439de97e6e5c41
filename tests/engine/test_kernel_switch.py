"""`model.kernels: torch` is without Triton's product of experts and without FlashAttention 3."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine import rank_model
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.model import experts
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan import forward
from ds_finetune.plan.kernels import SINGLE, ChosenKernels
from ds_finetune.plan.plan import Plan, Recomputation, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer import dry_run
from tests.model.memory.test_kept_outputs import model_of as lm_of
from tests.model.tiny import CONFIGS
from tests.planning import model_of

AUTO = ChosenKernels("torch", "nothing is installed (auto)")
GPU, AMPERE = torch.device("cuda", 0), (8, 0)
Planned = tuple[Plan, ModelPlan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planned]:
    """On a GPU for which Triton's product of experts is."""
    monkeypatch.setattr(forward, "triton_problem", lambda: ("", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: AMPERE)
    AutoConfig.for_model("qwen3_moe", **CONFIGS["qwen3_moe"]).save_pretrained(tmp_path)
    tree = {"model": str(tmp_path), "data": {"train": "t.jsonl"}, "output_dir": "o"}
    config = RunConfig.model_validate(tree | {"train": {"global_batch_size": 1, "micro_batch_size": 1}})
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cuda")
    yield plan, model_of(config)
    experts.choose_product(has_triton=True)


@pytest.mark.parametrize(("chosen", "are_taken"), [(AUTO, True), (SINGLE, False)], ids=["auto", "torch"])
def test_the_run_file_decides(
    chosen: ChosenKernels, are_taken: bool, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model = replace(planned[0], kernels=chosen), planned[1]
    lm, wanted = lm_of("qwen3_moe"), []
    rank_model.arrange_forward(lm, plan, model)
    assert experts._is_own_kernel(GPU, torch.bfloat16) is are_taken
    monkeypatch.setattr(rank_model, "choose_flash_attention", lambda _, is_wanted: wanted.append(is_wanted))
    monkeypatch.setattr(rank_model, "packs_documents", lambda *_, **__: True)
    rank_model.trained_model(lm, plan, model, Groups(None, None, None, None, None), ())
    assert wanted == [are_taken]


def test_the_plan_names_both(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = planned
    monkeypatch.setattr(dry_run, "problem_of_flash_3", lambda _: "")
    of_auto, of_torch = (
        dict(dry_run.model_lines(model, replace(plan, kernels=chosen), capability=AMPERE)) for chosen in (AUTO, SINGLE)
    )
    assert of_auto["attention"] == "one call for all documents, by FlashAttention 3"
    assert of_torch["attention"] == "one call for all documents, by FlashAttention 2: model.kernels is torch"
    assert of_auto["experts"].startswith("a Triton kernel for all experts")
    assert "not Triton's: model.kernels is torch" in of_torch["experts"]


@pytest.mark.parametrize("stages", [1, 2])
def test_frozen_embeddings_have_gradients_in_pipelines_only(planned: Planned, stages: int) -> None:
    """There the first chunk of layers has a backward, also without adapters."""
    plan, model = planned
    plan = replace(plan, kernels=SINGLE, mesh=replace(plan.mesh, pp=stages)).with_recomputation("none")
    lm = lm_of("qwen3_moe", has_lora=True)
    ways: tuple[Recomputation, ...] = ("none", "full")
    for way in ways:
        rank_model.arrange_forward(lm, plan.with_recomputation(way), model)
        assert lm.get_input_embeddings()(torch.tensor([1])).requires_grad is (stages > 1)
