"""DeepSeek-V4 on rows whose documents end at edges of windows and of ranks, on real ranks: loss and gradients are those of
transformers' eager model on each document alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.reference.selftest.cells import TINY_MODELS
from tests.model.attention.test_compressed_attention import EDGES, HOSTILE, ROWS, fill
from tests.parity.edge_worker import EdgeCell, Lengths, token_ids
from tests.parity.reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, relative
from tests.running import start, torchrun

BORDERS: Lengths = ((40, 40), (20, 20, 40), (39, 1, 40), (41, 39), (38, 4, 38), (19, 61), (17, 46, 17), (2,) * 40)
"""Documents that end at the borders of 2 and 4 ranks, one token before or after, and across them."""
FEW: Lengths = (EDGES[0], (20, 20, 40), (19, 61), (1,) * 80)
RARE: Lengths = ((3, 2, 1, 1, 3) * 8, (3, 2, 1, 1, 3) * 8, (1,) * 80, (79, 1))
"""Hardly any entries, and none on some ranks."""
ALONE: Lengths = tuple((length,) for length in (1, 2, 3, 4, 5, 7, 11, 12, 13, 16, 17, 23, 41, 47, 79, 80))
"""Rows of one document, which are padded."""
MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    name: (changes | ({"compress_rate_hca": 80} if "longer than rows" in name else {}), 4 if "2 and 3" in name else 3)
    for name, changes in HOSTILE.items()
}
"""Changes of a tiny model and the seed of its weights: with others a gate may be within rounding of the limit where its
gradient ends.
"""
AXES: Mapping[int, tuple[tuple[dict[str, int], int], ...]] = {
    2: (({"sp": 2}, 3), ({"sp": 2, "ep": 2}, 2), ({"tp": 2}, 1), ({"ep": 2}, 2)),
    4: (
        ({"sp": 4}, 3),
        ({"sp": 4, "ep": 4}, 2),
        ({"sp": 2, "ep": 2}, 2),
        ({"tp": 2, "sp": 2}, 1),
        ({"sp": 2, "pp": 2}, 1),
    ),
}
"""Layouts and their ZeRO stages by number of ranks."""
Run = tuple[EdgeCell, int]
DEFAULT: list[Run] = [
    (EdgeCell("as it is", {"sp": 4}, FEW), 4),
    (EdgeCell("as it is", {"sp": 2, "ep": 2}, BORDERS[3:5]), 2),
    (EdgeCell("as it is", {"tp": 2}, FEW[:2]), 2),
]
SLOW: list[Run] = [
    *((EdgeCell(name, {"sp": sp}, rows), sp) for name in MODELS for sp in (2, 4) for rows in (ROWS, EDGES, BORDERS)),
    *(
        (EdgeCell(name, axes, BORDERS, stage), ranks)
        for name in ("as it is", "windows of 2 and 3", "all layers choose")
        for ranks, layouts in AXES.items()
        for axes, stage in layouts
    ),
    *((EdgeCell("as it is", {"sp": sp}, RARE), sp) for sp in (2, 4)),
    *(
        (EdgeCell(name, {"sp": sp}, ALONE, packing=False), sp)
        for name in ("as it is", "one entry chosen")
        for sp in (2, 4)
    ),
]


def _names(runs: Sequence[Run]) -> list[str]:
    return [
        f"{number}-{cell.model}-{''.join(f'{k}{v}' for k, v in cell.parallel.items())}"
        for number, (cell, _) in enumerate(runs)
    ]


def _run(runs: Sequence[Run], folder: Path) -> Path:
    """One step of each cell, one launch for each number of ranks, as models and results in `folder`."""
    for name in {cell.model for cell, _ in runs}:
        changes, seed = MODELS[name]
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"] | changes))
        with torch.no_grad():
            fill(lm.float())
        lm.save_pretrained(folder / name)
    for ranks, some in groupby(sorted(enumerate(runs), key=lambda each: each[1][1]), key=lambda each: each[1][1]):
        (folder / "cells.json").write_text(json.dumps([(f"{number}.pt", *cell) for number, (cell, _) in some]))
        done = start(torchrun("tests/parity/edge_worker.py", str(folder), ranks=ranks), timeout=1800)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


@cache
def _alone(folder: Path, rows: Lengths) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of all documents, one at a time, and its gradient."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parts = [part for ids, lengths in zip(token_ids(rows), rows, strict=True) for part in ids.split(lengths)]
    number, total = sum(len(part) - 1 for part in parts), 0.0
    for part in parts:
        logits = lm(part[None], use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, part[1:], reduction="sum") / number
        loss.backward()
        total += loss.item()
    return total, {name: param.grad for name, param in lm.named_parameters() if param.grad is not None}


def _assert_equals_documents_alone(runs: Sequence[Run], number: int, folder: Path) -> None:
    cell = runs[number][0]
    loss, gradients = _alone(folder / cell.model, cell.rows)
    found = torch.load(folder / f"{number}.pt", weights_only=True)
    assert found["loss"] == pytest.approx(loss, abs=LOSS_TOLERANCE)
    # One expert's share is always 1, and so is the sum of one stream's weights: their gradients are rounding only.
    least = 1e-2 * float(torch.nn.utils.get_total_norm(list(gradients.values())))
    for name, wanted in gradients.items():
        apart = relative(found["gradients"].pop(name), wanted) * float(wanted.norm())
        assert apart < GRADIENT_TOLERANCE * (float(wanted.norm()) + least), name
    assert not any(other.any() for other in found["gradients"].values())


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield _run(DEFAULT, tmp_path_factory.mktemp("edges"))
    _alone.cache_clear()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield _run(SLOW, tmp_path_factory.mktemp("edges-slow"))
    _alone.cache_clear()


@pytest.mark.parametrize("number", range(len(DEFAULT)), ids=_names(DEFAULT))
def test_documents_at_edges(number: int, default: Path) -> None:
    _assert_equals_documents_alone(DEFAULT, number, default)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SLOW)), ids=_names(SLOW))
def test_other_documents_and_layouts(number: int, slow: Path) -> None:
    _assert_equals_documents_alone(SLOW, number, slow)
