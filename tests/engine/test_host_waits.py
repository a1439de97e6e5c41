"""On a GPU the host waits for the device at most three times in a step, whatever the number of layers and micro-batches,
DeepSpeed's own waits included; see `tests/host_waits.py` for what is seen of them on a CPU.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, run_tree
from ds_finetune.reference.selftest.compare import write_model
from tests.lora_twin import lora_tree
from tests.parity.mtp_cells import write_mtp_model
from tests.parity.reference import asked_for
from tests.running import start, torchrun

WORKER = Path(__file__).with_name("waits_worker.py")
MOST = 3
"""Waits of a whole step."""


_AFTER_BACKWARD = "stream synchronized at runtime/zero/stage3.py:1414"
_UPDATED = "copy to the device at runtime/zero/stage3.py:2858"
"""Where DeepSpeed 0.19.8 lets the host wait at stage 3: after each backward, and with offload for the updated weights of
each optimizer group.
"""
GROUPS = 4
"""Optimizer groups of a model at most: with and without weight decay, each of experts or of an indexer and others."""


@dataclass(frozen=True)
class Layout:
    """A cell on a number of ranks, the layers of its model, and further sections of the run file."""

    cell: Cell
    world: int = 1
    layers: int = 2
    sections: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        cell = self.cell
        parts = [cell.family, cell.layout.replace(" ", ""), f"z{cell.stage}", cell.objective, self.label]
        parts += ["packed" if cell.packing else "padded", cell.precision]
        parts += [f"acc{cell.accumulation}", f"layers{self.layers}", str(self.world)]
        parts += ["recomputed"] * cell.checkpointing + ["clipped"] * (cell.max_grad_norm > 0)
        parts += [f"offload-{cell.offload}"] * (cell.offload != "none")
        return "-".join(part for part in parts if part)

    @property
    def most(self) -> int:
        """The waits that are allowed: under expert parallelism one more in each layer with experts for each pass."""
        if self.cell.ep == 1:
            return MOST
        forwards = self.cell.accumulation * (2 if self.cell.checkpointing else 1)
        return MOST + forwards * (self.layers - 1)


_CLIPPED = partial(Cell, packing=True, max_grad_norm=0.5, checkpointing=True)
_MTP = {"mtp": {"train": True, "weight": 0.3, "detach": False}}
_INDEXER = {"indexer": {"train": True, "weight": 0.1, "stage": "sparse"}}
_LORA = {"lora": lora_tree("deepseek_v3")}
CHOSEN = [
    Layout(_CLIPPED("deepseek_v3", 2, 2, balances=True), layers=4),
    Layout(Cell("llama", 0, 2, packing=True, max_grad_norm=0.5, objective="dpo"), layers=2),
    Layout(_CLIPPED("llama", 2, 2, offload="optimizer"), layers=2),
    Layout(_CLIPPED("deepseek_v3", 3, 1, ep=2), 2, layers=2),
]
FURTHER = [
    Layout(Cell("deepseek_v3", 3, 1, packing=False), layers=2, sections=_LORA, label="lora"),
    Layout(Cell("llama", 0, 4, packing=True, max_grad_norm=0.5), layers=2),
    Layout(Cell("llama", 1, 4, packing=True, objective="dpo"), layers=2),
    Layout(Cell("llama", 2, 2, packing=True, max_grad_norm=0.5, objective="grpo"), layers=2),
    Layout(_CLIPPED("deepseek_v3", 1, 4, tp=2), 2, layers=4),
]


def _depths(cell: Cell, world: int = 1, **others: Any) -> list[Layout]:
    """A cell with two and with four layers."""
    return [Layout(cell, world, layers, **others) for layers in (2, 4)]


def _matrix() -> list[Layout]:
    found = []
    for family in ("llama", "deepseek_v3"):
        for stage in range(4):
            for accumulation in (1, 4):
                found += _depths(_CLIPPED(family, stage, accumulation))
                found += _depths(Cell(family, stage, accumulation, packing=False))
            found += _depths(_CLIPPED(family, stage, 4), 2)
            found += _depths(Cell(family, stage, 4, packing=True, objective="dpo"))
            found += _depths(_CLIPPED(family, stage, 4, precision="bf16"))
            for axis in ("tp", "sp", *(["ep"] if family == "deepseek_v3" else [])):
                found += _depths(_CLIPPED(family, stage, 4, **{axis: 2}), 2)
        for stage in (0, 1):
            found += [Layout(_CLIPPED(family, stage, 4, pp=2), 2, layers=4)]
    for stage in range(4):
        found += _depths(_CLIPPED("deepseek_v3", stage, 4, balances=True), 2, label="balanced")
        found += _depths(Cell("deepseek_v3", stage, 4, packing=True), sections=_LORA, label="lora")
        found += _depths(_CLIPPED("deepseek_v3", stage, 4), sections=_MTP, label="mtp")
        found += _depths(_CLIPPED("deepseek_v32_sparse", stage, 4), sections=_INDEXER, label="indexer")
    for objective in ("kto", "orpo", "reward"):
        found += _depths(Cell("deepseek_v3", 1, 4, packing=True, objective=objective))
    return found + _offloads()


def _offloads() -> list[Layout]:
    found = []
    for stage, accumulation in product((1, 2, 3), (1, 4)):
        for precision in ("fp32", "bf16"):
            cell = _CLIPPED("llama", stage, accumulation, offload="optimizer", precision=precision)
            found += _depths(cell) + _depths(cell, 2)
        indexed = _CLIPPED("deepseek_v32_sparse", stage, accumulation, offload="optimizer")
        found += _depths(indexed, sections=_INDEXER, label="indexer")
    return found


OTHERS = [*FURTHER, *(layout for layout in _matrix() if layout not in (*CHOSEN, *FURTHER))]
assert len({layout.name for layout in OTHERS}) == len(OTHERS), "a file of each layout has its name"


def _write_model(layout: Layout, out: Path) -> Path:
    family, sizes, is_mtp = layout.cell.family, {"num_hidden_layers": layout.layers}, layout.label == "mtp"
    folder = out / f"{family}-{layout.layers}-{'mtp' if is_mtp else 'model'}"
    if not folder.exists() and is_mtp:
        write_mtp_model(family, folder, sizes=sizes)
    elif not folder.exists():
        write_model(AutoConfig.for_model(**TINY_MODELS[family] | sizes), folder)
    return folder


def _run(layouts: Sequence[Layout], out: Path) -> Path:
    for world in sorted({layout.world for layout in layouts}):
        trees = {}
        for layout in layouts:
            cell = layout.cell
            if layout.world == world:
                model = _write_model(layout, out)
                trees[layout.name] = run_tree(cell, model, out, dp=world // cell.sharing) | layout.sections
        (out / "trees.json").write_text(json.dumps(trees))
        done = start(torchrun(str(WORKER), str(out), str(out / "trees.json"), ranks=world), timeout=900)
        assert done.returncode == 0, done.stderr[-9000:]
    return out


@pytest.fixture(scope="session")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(CHOSEN, tmp_path_factory.mktemp("waits"))


@pytest.fixture(scope="session")
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(asked_for(request, OTHERS), tmp_path_factory.mktemp("waits-others"))


def _assert_few(layout: Layout, out: Path) -> None:
    for rank, found in enumerate(json.loads((out / f"{layout.name}.json").read_text())):
        own = {place: number for place, number in found.items() if not _is_of_stage_3(place)}
        assert sum(own.values()) <= layout.most, (rank, own)
        cell = layout.cell
        assert found.get(_AFTER_BACKWARD, 0) == (cell.accumulation if cell.stage == 3 else 0)
        assert found.get(_UPDATED, 0) <= (0 if cell.offload == "none" else GROUPS)


def _is_of_stage_3(place: str) -> bool:
    return place in (_AFTER_BACKWARD, _UPDATED)


@pytest.mark.parametrize("layout", CHOSEN, ids=[layout.name for layout in CHOSEN])
def test_a_step_waits_three_times(layout: Layout, chosen: Path) -> None:
    _assert_few(layout, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS, ids=[layout.name for layout in OTHERS])
def test_a_step_waits_three_times_in_other_layouts(layout: Layout, others: Path) -> None:
    _assert_few(layout, others)
