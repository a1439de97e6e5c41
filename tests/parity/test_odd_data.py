"""Loss and gradient of odd data against a plain loop: documents of two tokens and of a whole row, fewer rows than
ranks, ranks with nothing.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.data.batches import Batch, BatchPlan, eval_batches, training_batches
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.prepared_rows import PreparedRows, pack
from ds_finetune.engine.rank_rows import host_rows
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
from ds_finetune.model.loss.token_loss import TrainedModel, install_loss_head
from ds_finetune.model.weights.load import load_weights
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import LossAndSums
from tests.model.weights.test_weights import published
from tests.pairwise import pairwise
from tests.parity.odd_worker import LAYOUTS, SHAPES, OddCell
from tests.running import start, torchrun

ROW = 16
TOKENS = st.integers(3, 95)
DOCUMENT = st.integers(1, ROW + 4).flatmap(
    lambda size: st.tuples(
        st.lists(TOKENS, min_size=size, max_size=size), st.lists(st.booleans(), min_size=size, max_size=size)
    )
)
EDGES = st.sampled_from(
    [([5], [True]), ([5, 6], [False, True]), ([7] * ROW, [True] * ROW), ([8] * ROW, [False] * (ROW - 1) + [True])]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedModel, PreTrainedModel]:
    """The model of the program, and the one plain transformers loads."""
    folder = tmp_path_factory.mktemp("v3")
    published("deepseek_v3", folder)
    lm = build_skeleton(read_hf_config(str(folder)), attention="sdpa", dtype=torch.float32, device="cpu")
    load_weights(lm, folder, family=family_of("deepseek_v3"))
    install_loss_head(lm)
    return TrainedModel(lm), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain(model: Any, documents: list[tuple[list[int], list[bool]]]) -> tuple[float, int]:
    """Summed loss over every supervised token, one document at a time, with its gradient; and their number."""
    total, number = 0.0, 0
    for ids, mask in documents:
        wanted = torch.tensor(
            [token if is_on else IGNORE_INDEX for token, is_on in zip(ids[1:], mask[1:], strict=True)],
            dtype=torch.int64,
        )
        if not any(mask[1:]):
            continue
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
        loss.backward()
        total, number = total + loss.item(), number + int((wanted != IGNORE_INDEX).sum())
    return total, number


def ours(model: TrainedModel, batches: Iterator[Batch]) -> tuple[float, int]:
    """The same of batches, forward by forward."""
    total, number = 0.0, 0
    for batch in batches:
        number += batch.num_supervised_tokens
        for micro in batch.micro:
            found = model(host_rows(micro, None))
            assert isinstance(found, LossAndSums)
            found.loss.backward()
            total += found.loss.item()
    return total, number


def rows_of(documents: list[tuple[list[int], list[bool]]], *, packing: bool) -> PreparedRows | None:
    kept = Documents.of([TokenisedDocument(ids[:ROW], mask[:ROW]) for ids, mask in documents if any(mask[1:ROW])])
    counts = kept.counts
    if not counts.documents:
        return None
    bins = pack(np.diff(kept.offsets), ROW) if packing else [np.array([number]) for number in range(counts.documents)]
    return PreparedRows(
        kept, np.concatenate(bins), np.concatenate([[0], np.cumsum([len(row) for row in bins])]), counts
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(DOCUMENT | EDGES, min_size=1, max_size=9),
    st.booleans(),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 4), (2, 3, 1), (4, 2, 2)]),
)
def test_every_supervised_token_counts_once(
    models: tuple[TrainedModel, PreTrainedModel],
    documents: list[tuple[list[int], list[bool]]],
    packing: bool,
    shares: tuple[int, int, int],
) -> None:
    """Over an epoch, whatever number of ranks, micro-batch and accumulation share it; and in evaluation."""
    model, theirs = models
    rows = rows_of(documents, packing=packing)
    if rows is None:
        return
    dp, micro, accumulation = shares
    theirs.zero_grad()
    wanted = plain(theirs, [(ids[:ROW], mask[:ROW]) for ids, mask in documents])
    gradients = {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}
    plans = [
        BatchPlan(
            dp * micro * accumulation,
            micro,
            rank,
            dp,
            0,
            shuffle=True,
            pad_token_id=0,
            row_len=ROW if packing else None,
        )
        for rank in range(dp)
    ]
    for batches in (
        lambda plan: training_batches(rows, plan, start_step=0, total_rows=len(rows)),
        lambda plan: eval_batches(rows, plan),
    ):
        model.zero_grad()
        found = [ours(model, batches(plan)) for plan in plans]
        assert sum(number for _, number in found) == wanted[1] == rows.counts.supervised
        assert sum(total for total, _ in found) == pytest.approx(wanted[0], rel=1e-5)
        for name, param in model.lm.named_parameters():
            if name in gradients:
                assert param.grad is not None
                assert float((param.grad - gradients[name]).norm()) <= 1e-4 * float(gradients[name].norm()) + 1e-5, name


ALL = [OddCell(*layout, shape, packing) for layout, shape, packing in product(LAYOUTS, SHAPES, (False, True))]
CHOSEN = pairwise(ALL, lambda cell: (cell.family, cell.stage, tuple(cell.parallel), cell.shape, cell.packing))
"""Every pair of values of two axes; the full product is behind the marker."""
REST = [cell for cell in ALL if cell not in CHOSEN]


def _run(cells: Sequence[OddCell], folder: Path) -> Path:
    """One step of each cell on two ranks, in one launched world."""
    for family in ("deepseek_v3", "qwen2"):
        published(family, folder / family)
    (folder / "cells.json").write_text(json.dumps(cells))
    done = start(torchrun("tests/parity/odd_worker.py", str(folder), str(folder / "cells.json")))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(CHOSEN, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(REST, tmp_path_factory.mktemp("odd-rest"))


@pytest.mark.parametrize("cell", CHOSEN, ids=lambda cell: cell.name)
def test_ranks_and_forwards_with_nothing_supervised(results: Path, cell: OddCell) -> None:
    _assert_equals_plain_loop(results, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", REST, ids=lambda cell: cell.name)
def test_others_with_nothing_supervised(rest: Path, cell: OddCell) -> None:
    _assert_equals_plain_loop(rest, cell)


def _assert_equals_plain_loop(folder: Path, cell: OddCell) -> None:
    found = torch.load(folder / f"{cell.name}.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder / cell.family, dtype=torch.float32)
    total, number = plain(model, SHAPES[cell.shape])
    assert found["supervised"] == number
    assert found["loss"] == pytest.approx(total / number, abs=1e-6)
    assert found["eval"] == pytest.approx(total / number, abs=1e-6)
    norm = torch.nn.utils.get_total_norm(
        [param.grad / number for param in model.parameters() if param.grad is not None]
    )
    assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, param in model.named_parameters():
        if param.grad is not None:
            wanted = param.grad / number
            # A token that attends to itself alone gives queries and keys a gradient of 0, and rounding gives another
            # one.
            limit = 1e-4 * float(wanted.norm()) + 1e-6 * float(norm)
            assert float((found["gradients"][name] - wanted).norm()) < limit, name
