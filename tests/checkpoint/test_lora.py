"""A checkpoint of adapters holds them alone, and goes on at any ZeRO stage and in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.checkpoint.commit import Manifest, part_name
from ds_finetune.checkpoint.part_storage import PartReader
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.same_run import RunIdentity, changes_since_checkpoint
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import CheckpointError
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.reference.selftest.cells import hf_config
from tests.checkpoint.layouts import Layout
from tests.checkpoint.test_layouts import assert_goes_on, name_of, run

RANK = 8
STAGES = [Layout(stage, lora=RANK) for stage in range(4)]
TENSOR = Layout(1, lora=RANK, tp=2)
SHARDED = [TENSOR, *(Layout(3, lora=RANK, **{axis: 2}) for axis in ("tp", "sp", "ep")), Layout(0, lora=RANK, pp=2)]
"""Layouts of two ranks that hold parts of adapters, or tokens of the same rows."""
ALL = [
    *STAGES,
    Layout(2, "cpu", lora=RANK),
    Layout(3, "cpu", lora=RANK),
    Layout(3, "cpu", "cpu", lora=RANK),
    Layout(1, precision="bf16", lora=RANK),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(hf_config("deepseek_v3")).float().save_pretrained(place / "models" / "deepseek_v3")
    return place


def test_adapters_are_saved_alone_and_go_on_at_another_stage(folder: Path) -> None:
    zero0, zero2, zero3 = STAGES[0], STAGES[2], STAGES[3]
    pairs = [(zero3, zero3), (zero0, zero3), (TENSOR, zero2)]
    found = run(2, [zero0, zero3, TENSOR], [(name_of(source, 2), layout) for source, layout in pairs], folder)
    for source, layout in pairs:
        key = f"{name_of(source, 2)} -> {name_of(layout, 2)}"
        assert_goes_on(found[key], found[f"saved {name_of(source, 2)}"], key)
    losses = [step["loss"] for step in found[f"saved {name_of(zero0, 2)}"]["after"]]
    assert abs(losses[0] - losses[1]) > 1e-3
    saved = next((folder / "states" / name_of(zero3, 2)).glob("step-*"))
    manifest = Manifest.read(saved)
    held = PartReader(saved / part_name(rank, 2) for rank in range(2)).held
    kinds = {kind for kind, _, _ in map(str.partition, held, "/" * len(held))}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "buffer"}
    assert all(is_adapter(key.partition("/")[2]) for key in held if not key.startswith("buffer/"))
    numel = plan_lora(hf_config("deepseek_v3"), LoraConfig(rank=RANK)).num_params
    assert manifest.num_bytes < 3 * 4 * numel + 100_000


@pytest.mark.parametrize(
    ("lora", "base", "said"),
    [
        ({"rank": 16}, "b", "lora.rank 8 -> 16"),
        ({"rank": 8, "alpha": 8}, "b", "lora.alpha 32.0 -> 8.0"),
        ({"rank": 8, "target_modules": ["o_proj"]}, "b", r"lora.target_modules None -> \['o_proj'\]"),
        (None, "", "lora.rank 8 -> None"),
        ({"rank": 8}, "other", "weights of the base model b -> other"),
    ],
)
def test_other_adapters_or_another_base_are_another_run(lora: dict[str, Any] | None, base: str, said: str) -> None:
    tree = {"model": "m", "data": {"train": "rows"}, "output_dir": "out"}
    config = RunConfig.model_validate(tree | {"lora": {"rank": 8}})
    state = RunState(1, 0, 0, (0, 0), {}, {}, {}, "", config.model_dump(mode="json", by_alias=True), {}, {}, "b")
    assert not changes_since_checkpoint(state, RunIdentity(state.config, "", "b"))
    other = RunConfig.model_validate(tree | {"lora": lora}).model_dump(mode="json", by_alias=True)
    with pytest.raises(CheckpointError, match=said):
        changes_since_checkpoint(state, RunIdentity(other, "", base))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_from_every_other(folder: Path, world: int) -> None:
    saved = {key: value for ranks in (1, 2) for key, value in run(ranks, ALL, [], folder).items()}
    precise = [layout for layout in ALL if layout.precision == "fp32"]
    pairs = [(name_of(source, ranks), layout) for ranks in (1, 2) for source in precise for layout in precise]
    pairs += [(name_of(ALL[-1], world), ALL[-1])]
    for key, value in run(world, [], pairs, folder).items():
        assert_goes_on(value, saved[f"saved {key.split(' -> ')[0]}"], key)


@pytest.mark.slow
def test_every_layout_from_every_other(folder: Path) -> None:
    layouts = [*SHARDED, STAGES[2]]
    saved = run(2, layouts, [], folder)
    pairs = [(name_of(source, 2), layout) for source in layouts for layout in layouts]
    for key, value in run(2, [], pairs, folder).items():
        assert_goes_on(value, saved[f"saved {key.split(' -> ')[0]}"], key)
