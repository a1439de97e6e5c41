"""The layouts that the search may propose are those that `train` accepts: no other, and none is missing."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import FinetuneError
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.planned_model import model_of_run
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.search.candidates import (
    ACTIVATIONS,
    OFFLOADS,
    STAGES,
    Candidate,
    Candidates,
    Layout,
    Ranks,
    check_run,
)
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import TINY_MODELS, hf_config
from ds_finetune.trainer.resolve import make_model_plan
from tests.planning import all_layouts, layout_of

NAMES = [name for name, family in FAMILIES.items() if family.tiny_models]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"lora": {"rank": 8}},
    {"train": {"precision": "fp32"}},
    {"model": {"attention": "eager"}},
    {"optim": {"name": "Muon"}},
    {"indexer": {"train": True}},
]


def _folder(tmp_path: Path, name: str) -> str:
    folder = tmp_path / name
    if not folder.exists():
        hf_config(name).save_pretrained(folder)
    return str(folder)


def _config(folder: str, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {"data": {"train": "t.jsonl"}, "output_dir": "o", **sections}
    tree["model"] = {"path": folder, **sections.get("model", {})}
    train = {"for": "1 steps", "global_batch_size": 8, "max_seq_len": 32, "precision": "bf16"}
    tree["train"] = {**train, **sections.get("train", {})}
    return RunConfig.model_validate(tree)


def _candidates(config: RunConfig, ranks: Ranks) -> Candidates:
    return Candidates(RunSettings.of(config), model_of_run(RunSettings.of(config)), ranks)


def _model_of(candidate: Candidate) -> ModelPlan:
    """The plan of the model as `train` makes it."""
    return make_model_plan(candidate.plan)


def _check(name: str, changes: dict[str, Any], folder: str, *, number: int, most: int) -> None:
    """`train` accepts layouts that are drawn for each parallel size, of `most` sizes."""
    rng, config = random.Random(f"{name} {number}"), _config(folder, **changes)
    try:
        check_run(RunSettings.of(config), model_of_run(RunSettings.of(config)))
    except FinetuneError:
        # What the search refuses in every layout, `train` refuses on one rank too.
        assert not _accepted(config, Layout(ParallelConfig(), 1, "none", 1, ACTIVATIONS[0]), Ranks(1, 1, "cuda"))
        return
    candidates = _candidates(config, Ranks(number, 8, "cuda"))
    for each in rng.sample(candidates.sizes, min(most, len(candidates.sizes))):
        largest = candidates.micro_batch_sizes(each)[-1], candidates.activations[0]
        pairs = itertools.product(STAGES, OFFLOADS)
        stages = [pair for pair in pairs if candidates.find(Layout(each, *pair, *largest)) is not None]
        for stage, offload in rng.sample(stages, min(2, len(stages))):
            activations, rows = rng.choice(candidates.activations), rng.choice(candidates.micro_batch_sizes(each))
            found = candidates.find(Layout(each, stage, offload, rows, activations))
            assert found is not None
            assert layout_of(found.plan) == found.layout
            planned = make_plan(found.plan, world=candidates.ranks.world, device=candidates.ranks.device)
            assert found.plan == planned
            assert _model_of(found).stages


@pytest.mark.parametrize("name", NAMES)
def test_train_accepts_what_may_be_proposed(name: str, tmp_path: Path) -> None:
    changes = random.Random(name).choice(VARIANTS)
    _check(name, changes, _folder(tmp_path, name), number=8, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_train_accepts_every_size_of_every_model(name: str, number: int, tmp_path: Path) -> None:
    for changes in VARIANTS:
        _check(name, changes, _folder(tmp_path, name), number=number, most=100)


def _accepted(config: RunConfig, layout: Layout, ranks: Ranks) -> bool:
    """Whether `train` accepts the layout."""
    wanted = layout.apply(RunSettings.of(config))
    try:
        plan = make_plan(wanted, world=ranks.world, device=ranks.device)
        return bool(make_model_plan(replace(wanted, mesh=plan.mesh)).stages)
    except FinetuneError:
        return False


@pytest.mark.parametrize(("name", "number"), [("deepseek_v3_deep", 4), ("qwen2", 6)])
def test_no_layout_is_missing(name: str, number: int, tmp_path: Path) -> None:
    config, ranks = _config(_folder(tmp_path, name), train={"global_batch_size": 12}), Ranks(number, 8, "cuda")
    found = {
        each.layout for each in all_layouts(_candidates(config, ranks)) if each.layout.activations in ACTIVATIONS[:2]
    }
    grid = (
        ParallelConfig(tp=tp, pp=pp, sp=sp, ep=ep)
        for tp, pp, sp, ep in itertools.product(range(1, number + 1), repeat=4)
    )
    sizes = [each for each in grid if _accepted(config, Layout(each, 1, "none", 1, ACTIVATIONS[0]), ranks)]
    others = itertools.product(sizes, STAGES, OFFLOADS, range(1, 13), ACTIVATIONS[:2])
    every = [Layout(*each) for each in others]
    expected = {layout for layout in every if _planned(config, layout, ranks)}
    assert found == expected


def _planned(config: RunConfig, layout: Layout, ranks: Ranks) -> bool:
    """Whether `make_plan` accepts the layout; the plan of the model depends on its sizes alone."""
    try:
        make_plan(layout.apply(RunSettings.of(config)), world=ranks.world, device=ranks.device)
    except FinetuneError:
        return False
    return True
