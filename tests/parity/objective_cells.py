"""Documents with targets and a made-up reference, the layouts in which objectives are compared with a plain loop, and
the run file of a layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ds_finetune.config.objectives import ObjectiveConfig, ObjectiveField
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows, Row, RowDocuments
from ds_finetune.families.configs import VOCAB
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import ROW_LEN, Cell, run_tree

LENGTHS = ((2, 3), (5, 4), (3, 30), (31, 9), (12, 12), (33, 31), (7, 2), (20, 24), (9, 16), (2, 2), (26, 6))
"""Tokens of the two documents of each pair, with the prompt; 11 pairs leave the last forwards short or empty."""
LR = 1e-2
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"name": "dpo", "nll_weight": 0.3},
    {"name": "dpo", "loss": "ipo"},
    {"name": "simpo"},
    {"name": "cpo"},
    {"name": "orpo"},
    {"name": "kto", "beta": 0.2, "desirable_weight": 1.3},
)
"""Sections of the run file."""


@dataclass(frozen=True)
class Document:
    """Token ids, the number of those that are the prompt, the target, and a made-up reference log-probability."""

    ids: np.ndarray
    prompt: int
    target: float
    reference: float

    @property
    def labels(self) -> np.ndarray:
        """The next token at each position if it is in the answer, int32 [tokens]."""
        labels = np.concatenate([self.ids[1:], [IGNORE_INDEX]]).astype(np.int32)
        labels[: self.prompt - 1] = IGNORE_INDEX
        return labels


@dataclass(frozen=True)
class Layout:
    """Where objectives are compared: a cell, its number of ranks, and whether adapters are trained."""

    cell: Cell
    world: int
    has_lora: bool = False
    quantize: str = ""
    """How the weights under the adapters are held: `nf4`, or as they are."""
    objectives: tuple[int, ...] = tuple(range(len(OBJECTIVES)))
    """Which of OBJECTIVES are compared, one after the other in the same engine."""

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        cell = self.cell
        rows = "packed" if cell.packing else "padded"
        kind = f"{cell.family}{'-lora' if self.has_lora else ''}{self.quantize and '-' + self.quantize}"
        return f"{cell.layout}-z{cell.stage}-{kind}-{rows}-acc{cell.accumulation}-{self.world}".replace(" ", "")


def section(tree: dict[str, Any]) -> ObjectiveConfig:
    """An objective's section of the run file."""
    found: ObjectiveConfig = TypeAdapter(ObjectiveField).validate_python(tree)
    return found


@cache
def documents() -> tuple[Document, ...]:
    """Documents by their number; each two are a pair. Both begin with the same prompt."""
    rng = np.random.default_rng(5)
    found = []
    for number, pair in enumerate(LENGTHS):
        prompt = int(rng.integers(1, min(pair)))
        shared = rng.integers(3, VOCAB, size=prompt)
        for side, length in enumerate(pair):
            ids = np.concatenate([shared, rng.integers(3, VOCAB, size=length - prompt)]).astype(np.int32)
            reference = -4.6 * (length - prompt) + float(rng.normal())
            found.append(Document(ids, prompt, float((number + side) % 3 == 0), reference))
    return tuple(found)


@cache
def mismatched_documents() -> tuple[Document, ...]:
    """The prompt of each document with another one's answer, and made-up references that are mostly worse."""
    found, every = [], mismatched(packing=False)
    for number, document in enumerate(documents()):
        other = documents()[every.partner(number)]
        ids = np.concatenate([document.ids[: document.prompt], other.ids[other.prompt :]])[:ROW_LEN]
        found.append(Document(ids, document.prompt, 0.0, -5.0 * (len(ids) - document.prompt) + number % 3))
    return tuple(found)


def mismatched(*, packing: bool) -> MismatchedAnswers:
    """What the program makes of the documents, each of which is a unit."""
    bins = _bins(1, packing=packing)
    kept = Documents.of(
        [TokenisedDocument(d.ids.tolist(), [n >= d.prompt for n in range(len(d.ids))]) for d in documents()]
    )
    order, offsets = np.concatenate(bins), np.cumsum([0, *map(len, bins)])
    rows = PreparedRows(kept, order, offsets, kept.counts)
    return MismatchedAnswers(rows, seed=0, max_seq_len=ROW_LEN, is_packed=packing)


def reference_of(number: int) -> float:
    """The made-up reference of a document, mismatched or not, by its number."""
    return (*documents(), *mismatched_documents())[number].reference


def rows(documents_per_unit: int, *, packing: bool) -> list[Row]:
    """Rows of units of consecutive documents: one unit a row, or as many as fit."""
    return [_row(numbers) for numbers in _bins(documents_per_unit, packing=packing)]


def _bins(documents_per_unit: int, *, packing: bool) -> list[list[int]]:
    """Numbers of the documents of each row."""
    numbers = range(len(documents()))
    units = [numbers[start : start + documents_per_unit] for start in numbers[::documents_per_unit]]
    bins: list[list[int]] = []
    for unit in units:
        tokens = sum(len(documents()[number].ids) for number in (*(bins[-1] if bins else ()), *unit))
        if not packing or not bins or tokens > ROW_LEN:
            bins.append([])
        bins[-1] += unit
    return bins


def _row(numbers: Sequence[int]) -> Row:
    held = [documents()[number] for number in numbers]
    lengths = np.array([len(document.ids) for document in held])
    labels = np.concatenate([document.labels for document in held])
    return Row(
        input_ids=np.concatenate([document.ids for document in held]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        labels=labels,
        supervised=int((labels != IGNORE_INDEX).sum()),
        documents=RowDocuments(
            lengths=lengths,
            numbers=np.array(numbers, dtype=np.int64),
            targets=np.array([document.target for document in held]),
            second=lengths,
        ),
    )


def layout_tree(layout: Layout, model: Path, out: Path) -> dict[str, Any]:
    """The run file of a layout; its batch has all pairs, and empty rows where it is larger."""
    cell = layout.cell
    dp = layout.world // cell.sharing
    share = dp * cell.accumulation
    size = -(-len(rows(2, packing=cell.packing)) // share)
    tree = run_tree(cell, model, out, dp=dp)
    tree["train"] |= {"global_batch_size": size * share, "micro_batch_size": size}
    quantize = {"quantize": layout.quantize} if layout.quantize else {}
    return tree | ({"lora": {"rank": 4, "alpha": 8} | quantize} if layout.has_lora else {})


def layouts(worlds: Sequence[int]) -> list[Layout]:
    """Every layout on these numbers of ranks."""
    plain = [
        Layout(Cell(family, stage, accumulation, packing=packing, checkpointing=packing), world, has_lora)
        for family, stage, accumulation, packing in product(("llama", "deepseek_v3"), range(4), (1, 2), (True, False))
        for world in worlds
        for has_lora in ((False, True) if family == "llama" else (False,))
    ]
    shared = [
        Layout(Cell(family, stage, accumulation, packing=packing, **dict.fromkeys(row.axes, 2)), world)
        for row in TESTED_LAYOUTS
        for family in ("llama", "deepseek_v3_deep" if {"pp", "ep"} <= row.axes else "deepseek_v3", "qwen2")
        if family.removesuffix("_deep") in row.families
        for stage, accumulation, packing in product(row.stages, (1, 2), (True, False))
        for world in worlds
    ]
    shared += [replace(layout, has_lora=True) for layout in shared if layout.cell.family == "llama"]
    return [*plain, *(layout for layout in shared if _runs(layout.cell, layout.world))]


def interleaved_layouts() -> list[Layout]:
    """Two chunks of layers on each of two pipeline ranks."""
    return [
        Layout(Cell("llama_deep", stage, accumulation, packing=packing, pp=2, vpp=2), 2, has_lora)
        for stage, accumulation, packing, has_lora in product((0, 1), (2, 4), (True, False), (False, True))
    ]


def _runs(cell: Cell, world: int) -> bool:
    return world % cell.sharing == 0 and world // (cell.tp * cell.pp) % cell.ep == 0
