"""Every layout that may be trained takes the steps of a plain single-process loop."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ds_finetune.families.table import FAMILIES
from ds_finetune.plan.mesh import TESTED_LAYOUTS, ParallelLayout
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell
from tests.pairwise import each_value, pairwise
from tests.parity.reference import (
    WORLDS,
    Run,
    assert_equals_plain_loop,
    is_for,
    reference_steps,
    result_of,
    run_cells,
    runs_asked_for,
    runs_of,
)

Value = TypeVar("Value")

FIRST = ("deepseek_v3", "llama")
"""Families whose pairs of values are all compared by default."""
OTHERS = tuple(name for name, family in FAMILIES.items() if family.tiny_models and name not in FIRST)
"""Families with one or two cells by default; their other cells are behind the marker."""
TENSOR = ParallelLayout(frozenset({"tp"}), (1,))
INDEXED = tuple(name for name in OTHERS if FAMILIES[name].indexer)
PLAIN = ParallelLayout(frozenset(), (0, 1, 2, 3))


def _cells(families: tuple[str, ...]) -> list[Cell]:
    return [
        _cell(family, row, stage, packing=packing)
        for row, family in itertools.product(TESTED_LAYOUTS, families)
        if TINY_MODELS[family]["model_type"] in row.families and _deep_enough(family, row) in TINY_MODELS
        for stage, packing in itertools.product(row.stages, (True, False))
    ]


def _cell(family: str, row: ParallelLayout, stage: int, *, packing: bool) -> Cell:
    """Packed with clipping and activation checkpointing, padded without."""
    return Cell(
        _deep_enough(family, row),
        stage,
        2,
        packing=packing,
        max_grad_norm=0.5 if packing else 0.0,
        checkpointing=packing,
        **dict.fromkeys(row.axes, 2),
    )


def _cells_by_turns(number: int, family: str) -> list[Cell]:
    """Packed with as many axes as two ranks have, at ZeRO 1 to 3; of every second family also padded with none of these
    axes.

    Stages and axes take turns over the families.
    """
    axes = FAMILIES[family].parallel_axes
    rows = [
        row
        for row in (*TESTED_LAYOUTS, PLAIN)
        if row.axes <= axes and is_for(_cell(family, row, row.stages[0], packing=True), 2)
    ]
    most = max(len(row.axes) for row in rows)
    packed = _turn(number, [row for row in rows if len(row.axes) == most])
    padded = _turn(number, [row for row in rows if not row.axes & packed.axes])
    cell = _cell(family, packed, _turn(number, [stage for stage in packed.stages if stage]), packing=True)
    other = _cell(family, padded, _turn(number // 2, padded.stages), packing=False)
    return [cell, other] if number % 2 else [cell]


def _turn(number: int, values: Sequence[Value]) -> Value:
    return values[number % len(values)]


def _deep_enough(family: str, row: ParallelLayout) -> str:
    """Stages that share out experts need some each; the first layer of some families has none."""
    deep = f"{family}_deep"
    return deep if {"pp", "ep"} <= row.axes and deep in TINY_MODELS else family


def _offloaded() -> list[Cell]:
    places = ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "param"))
    return [
        Cell(
            _deep_enough("deepseek_v3", row),
            stage,
            2,
            packing=True,
            offload=offload,
            max_grad_norm=0.5,
            **dict.fromkeys(row.axes, 2),
        )
        for row in TESTED_LAYOUTS
        for stage, offload in places
        if stage in row.stages
    ]


def _rounded(family: str = "deepseek_v3") -> list[Cell]:
    return [
        Cell(_deep_enough(family, row), stage, 2, packing=True, precision="bf16", **dict.fromkeys(row.axes, 2))
        for row in TESTED_LAYOUTS
        for stage in row.stages
        if stage or row.axes == {"sp"}
    ]


def _interleaved(families: tuple[str, ...]) -> list[Cell]:
    """Two chunks a rank, of models that have layers enough; padded with twice as many forwards."""
    return [
        replace(
            _cell(family, row, stage, packing=packing),
            family=f"{family}_deep",
            vpp=2,
            accumulation=2 if packing else 4,
            offload=offload,
        )
        for row, family in itertools.product(TESTED_LAYOUTS, families)
        if "pp" in row.axes and family in row.families and f"{family}_deep" in TINY_MODELS
        for stage, offload, packing in (
            *itertools.product(row.stages, ("none",), (True, False)),
            *([(1, "optimizer", True)] if family in FIRST else []),
        )
    ]


FOUR_STAGES = [
    Cell("llama_deep", 1, 4, packing=True, pp=4),
    Cell("llama_deep", 0, 1, packing=True, max_grad_norm=0.5, pp=4, pp_layers="2 1 1 1"),
    Cell("llama_deeper", 1, 4, packing=True, pp=4, vpp=2, checkpointing=True),
    Cell("llama_deeper", 0, 8, packing=False, pp=2, vpp=3, pp_layers="1 2 1 1 2 1"),
]
TIED = [
    Cell("qwen2", stage, 2, packing=True, offload=offload, max_grad_norm=0.5, pp=2)
    for stage, offload in ((0, "none"), (1, "none"), (1, "optimizer"))
]
"""The embedding is on the first stage, the head that shares its weight on the last."""
ONCE = [
    replace(cell, accumulation=4, reduces_once=True)
    for cell in _cells(("deepseek_v3",))
    + _offloaded()
    + [_cell("llama", PLAIN, stage, packing=False) for stage in (2, 3)]
    if cell.stage >= 2
]
"""Each rank keeps the gradients of four forwards, and they are reduced together."""
_ONCE_CELLS = (("deepseek_v3", "ep 2", 3, "none"), ("deepseek_v3", "sp 2", 3, "optimizer"), ("llama", "dp", 2, "none"))
ONCE_CHOSEN = [
    next(cell for cell in ONCE if (cell.family, cell.layout, cell.stage, cell.offload) == wanted)
    for wanted in _ONCE_CELLS
]
SPARSE = [
    replace(
        _cell(f"{family}_sparse", row, stage, packing=packing), family=f"{family}_sparse", accumulation=accumulation
    )
    for family in INDEXED
    for row in (PLAIN, *TESTED_LAYOUTS)
    if row.axes <= FAMILIES[family].parallel_axes
    for stage, (packing, accumulation) in itertools.product(row.stages, ((True, 4), (False, 1)))
]
"""Most documents are longer than `index_topk`."""
_SPARSE_CELLS = (
    ("deepseek_v32_sparse", "dp", 3, True),
    ("deepseek_v32_sparse", "tp 2", 2, False),
    ("glm_moe_dsa_sparse", "pp 2", 1, True),
)
SPARSE_CHOSEN = [cell for cell in SPARSE if (cell.family, cell.layout, cell.stage, cell.packing) in _SPARSE_CELLS]
INTERLEAVED = _interleaved((*FIRST, "qwen2"))
DEFAULT = _cells(FIRST) + _offloaded() + TIED
VARIANTS = ("deepseek_v2_lite", "deepseek_v3_moonlight", "glm4_moe_lite_types", "glm4_moe_air")
"""Two without latent queries; with experts in the first and third of three layers; without norms of queries and keys."""
GEMMA4 = ("gemma4_text_inputs", "gemma4_text_experts")
"""With embeddings of tokens for each layer and shared keys and values; with routed experts."""
BIASES = [_cell(family, TENSOR, 1, packing=True) for family in ("llama_biases", "glm4_moe")]
"""Shards of the biases of queries, keys and values; llama's attention also has a bias that every rank holds."""
MORE_BIASES = [cell for cell in _cells(("llama_biases", "deepseek_v3_biases")) if cell.tp > 1]
LARGEST = [
    cell
    for cell in _cells(("deepseek_v3", "qwen3_moe", "gpt_oss"))
    if {"pp", "ep"} < {axis for axis in ("pp", "sp", "tp", "ep") if getattr(cell, axis) > 1}
]
LARGEST += [cell for cell in _interleaved(("deepseek_v3", "gpt_oss")) if cell.sharing > 2 and cell.ep > 1]
"""Layouts of three axes, which are compared on eight ranks too."""
REST = _cells((*OTHERS, *VARIANTS, *GEMMA4)) + MORE_BIASES + FOUR_STAGES + SPARSE + ONCE
REST += INTERLEAVED + _interleaved(tuple(name for name in OTHERS if name != "qwen2"))
ALL = runs_of(DEFAULT) + runs_of(REST) + runs_of(DEFAULT + REST, worlds=(4,))
_ROUNDED = _rounded() + _rounded("gpt_oss")
_ROUNDED += [Cell("deepseek_v3_deep", 1, 2, packing=True, precision="bf16", pp=2, vpp=2)]
ALL_ROUNDED = runs_of(_ROUNDED) + runs_of(_ROUNDED, worlds=(4,))
ON_EIGHT = runs_of(LARGEST, worlds=(8,))


def _axes(run: Run) -> tuple[Hashable, ...]:
    cell, world = run
    return cell.family, cell.layout, cell.stage, cell.packing, cell.offload, world


def _without(runs: list[Run], chosen: list[Run]) -> list[Run]:
    return [run for run in runs if run not in chosen]


CHOSEN = pairwise(runs_of(DEFAULT), _axes)
"""Every pair of values of two axes; the full product is behind the marker."""
_OF_EACH = [cell for number, family in enumerate(OTHERS) for cell in _cells_by_turns(number, family)]
_NORMS_OVER_HEADS = [cell for cell in _cells(("olmoe",)) if cell.layout == "tp 2" and cell.stage == 1 and cell.packing]
"""The norms of queries and keys need the heads of all ranks."""
# Its second stage begins with a layer that would take the choice of the layer before.
_OF_EACH.append(Cell("glm_moe_dsa", 1, 2, packing=True, checkpointing=True, pp=2))
# Tables of token ids in later stages, and the whole vocabulary's on ranks that share it.
_OF_EACH += [Cell("deepseek_v4_deep", 0, 2, packing=True, checkpointing=True, **{axis: 2}) for axis in ("pp", "tp")]
_OF_EACH += [_cell(name, PLAIN, stage, packing=True) for stage, name in enumerate(GEMMA4, start=2)]
CHOSEN += each_value(runs_of(INTERLEAVED, worlds=WORLDS[-1:]), _axes)
CHOSEN += _without(
    runs_of(BIASES + SPARSE_CHOSEN + ONCE_CHOSEN + _OF_EACH + _NORMS_OVER_HEADS, worlds=WORLDS[-1:]), CHOSEN
)
ROUNDED = each_value(runs_of(_rounded()), _axes)
"""bf16 with every layout and with every stage; layouts are paired with stages in fp32."""


def _ids(runs: list[Run]) -> list[str]:
    return [
        f"{cell.layout}-z{cell.stage}-{cell.offload}-{cell.family}-{'packed' if cell.packing else 'padded'}-{world}"
        for cell, world in runs
    ]


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cells(CHOSEN + ROUNDED, models, tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="session")
def rest(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other layouts on two ranks, and all on four, where there are data parallel ranks beside."""
    others = runs_asked_for(request, _without(ALL + ALL_ROUNDED, CHOSEN + ROUNDED))
    return run_cells(others, models, tmp_path_factory.mktemp("parallel-rest"))


@pytest.mark.parametrize(("cell", "world"), CHOSEN, ids=_ids(CHOSEN))
def test_layout_equals_plain_loop(cell: Cell, world: int, results: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, result_of(cell, world, results), models)


def _assert_follows_fp32(cell: Cell, result: dict[str, Any], models: Path) -> None:
    """bf16 weights round the losses in the third digit; a gradient left out would show in the second."""
    wanted = reference_steps(models / cell.family, cell.max_grad_norm)
    assert result["losses"] == pytest.approx(wanted["losses"], abs=1.5e-2)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=2e-2)


@pytest.mark.parametrize(("cell", "world"), ROUNDED, ids=_ids(ROUNDED))
def test_layout_in_bf16_follows_fp32(cell: Cell, world: int, results: Path, models: Path) -> None:
    _assert_follows_fp32(cell, result_of(cell, world, results), models)


OTHER, OTHER_ROUNDED = _without(ALL, CHOSEN), _without(ALL_ROUNDED, ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), OTHER_ROUNDED, ids=_ids(OTHER_ROUNDED))
def test_other_layout_in_bf16_follows_fp32(cell: Cell, world: int, rest: Path, models: Path) -> None:
    _assert_follows_fp32(cell, result_of(cell, world, rest), models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), OTHER, ids=_ids(OTHER))
def test_other_layout_equals_plain_loop(cell: Cell, world: int, rest: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, result_of(cell, world, rest), models)


@pytest.fixture(scope="session")
def on_eight(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cells(runs_asked_for(request, ON_EIGHT), models, tmp_path_factory.mktemp("parallel-eight"))


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), ON_EIGHT, ids=_ids(ON_EIGHT))
def test_layout_of_three_axes_equals_plain_loop(cell: Cell, world: int, on_eight: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, result_of(cell, world, on_eight), models)
