"""Real tokens of each row and documents of each batch, counted by hand: padding and rows that fill a batch have none."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import ClassificationObjective, KtoObjective, RewardObjective
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.batches import Batch, BatchPlan, eval_batches, training_batches
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.stream import open_stream, streaming_batches

LIMITS = TokenLimits(max_seq_len=16, vocab_size=128)
PAD = 2
LABELLED = RowKind.of(ClassificationObjective(name="classification", num_labels=1))
PAIRS, MARKED = RowKind.of(RewardObjective(name="reward")), RowKind.of(KtoObjective(name="kto"))


def config_of(records: list[dict[str, Any]], folder: Path, **options: object) -> DataConfig:
    path = folder / "rows.json"
    path.write_text(json.dumps(records))
    return DataConfig.model_validate({"train": str(path), "cache_dir": str(folder / "cache"), **options})


def dialogues(*lengths: int) -> list[dict[str, Any]]:
    """Records of so many tokens, two of which are supervised."""
    return [{"prompt": "p" * (length - 5), "completion": "a"} for length in lengths]


def preferences(*lengths: int) -> list[dict[str, Any]]:
    """Pairs with an answer of so many tokens, and one of a token more."""
    return [{"prompt": "p" * (length - 5), "chosen": "a", "rejected": "bb"} for length in lengths]


def plan(rank: int = 0, dp: int = 1, micro: int = 1, **options: Any) -> BatchPlan:
    given = {"row_len": None, "shuffle": False, **options}
    return BatchPlan(4, micro, rank, dp, 0, pad_token_id=PAD, **given)


def lengths_of(batches: list[Batch]) -> list[list[int]]:
    """Real tokens of each row of each batch. What is behind them is padding, and their last one is none."""
    for batch in batches:
        for micro in batch.micro:
            for ids, length in zip(micro.input_ids.tolist(), micro.lengths.tolist(), strict=True):
                assert set(ids[length:]) <= {PAD}
                assert not length or ids[length - 1] != PAD
        assert batch.num_tokens == sum(int(micro.lengths.sum()) for micro in batch.micro)
    return [[length for micro in batch.micro for length in micro.lengths.tolist()] for batch in batches]


def documents_of(batches: list[Batch]) -> list[int]:
    return [batch.counts["documents"] for batch in batches]


@pytest.mark.parametrize("micro", [1, 2])
def test_rows_of_one_document(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, micro: int) -> None:
    config = config_of(dialogues(5, 9, 6, 12, 8, 7), tmp_path, packing=False)
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
    found = [list(training_batches(rows, plan(r, 2, micro), start_step=0, total_rows=6)) for r in range(2)]
    assert [lengths_of(batches) for batches in found] == [[[5, 9], [8, 7]], [[6, 12], [0, 0]]]
    assert [documents_of(batches) for batches in found] == [[2, 2], [2, 0]]
    evaluated = [list(eval_batches(rows, plan(r, 2, micro), limit=5)) for r in range(2)]
    assert sum(sum(documents_of(batches)) for batches in evaluated) == 5
    assert sum(sum(lengths) for batches in evaluated for lengths in lengths_of(batches)) == 5 + 9 + 6 + 12 + 8


def test_packed_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = prepare_rows(config_of(dialogues(11, 5, 9, 7, 6), tmp_path), "train", tokenizer=tokenizer, limits=LIMITS)
    batches = list(training_batches(rows, plan(row_len=16), start_step=0, total_rows=3))
    assert lengths_of(batches) == [[16, 16, 6, 0]]
    assert documents_of(batches) == [5]


@pytest.mark.parametrize("packing", [False, True])
def test_each_side_of_a_pair_is_a_document(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, packing: bool) -> None:
    config = config_of(preferences(6, 7, 6), tmp_path, packing=packing)
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS, kind=PAIRS)
    pairs = plan(row_len=32 if packing else None, documents_per_unit=2)
    batches = list(training_batches(rows, pairs, start_step=0, total_rows=len(rows)))
    assert [(batch.counts["pairs"], batch.counts["documents"]) for batch in batches] == [(3, 6)]
    assert sum(lengths_of(batches)[0]) == 6 + 7 + 7 + 8 + 6 + 7


@pytest.mark.parametrize("separates_padding", [False, True])
@pytest.mark.parametrize("kind", [LABELLED, MARKED], ids=["labelled", "marked"])
def test_labelled_and_marked_texts(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: RowKind, separates_padding: bool
) -> None:
    """A document counts also where none of its tokens is supervised."""
    records = [
        {"text": "x" * (length - 1), "label": length} if kind is LABELLED
        else {**dialogues(length)[0], "label": length > 7}
        for length in (6, 9, 7)
    ]  # fmt: skip
    config = config_of(records, tmp_path, packing=False)
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS, kind=kind)
    alone = plan(documents_per_unit=1, separates_padding=separates_padding)
    batches = list(training_batches(rows, alone, start_step=0, total_rows=3))
    assert (lengths_of(batches), documents_of(batches)) == ([[6, 9, 7, 0]], [3])


@pytest.mark.parametrize("row_len", [None, 16])
def test_a_stream(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row_len: int | None) -> None:
    config = config_of(dialogues(10, 6, 9, 7), tmp_path, packing=row_len is not None, streaming=True)
    stream = open_stream(config, "train", tokenizer=tokenizer, limits=LIMITS)
    batches = list(streaming_batches(stream, plan(row_len=row_len), steps=2))
    assert [sorted(lengths) for lengths in lengths_of(batches)] == [[16] * 4 if row_len else [6, 7, 9, 10]] * 2
    assert documents_of(batches) == ([8, 8] if row_len else [4, 4])


def test_a_stream_of_pairs(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config = config_of(preferences(6, 6, 6, 6), tmp_path, packing=False, streaming=True)
    stream = open_stream(config, "train", tokenizer=tokenizer, limits=LIMITS, kind=PAIRS)
    batches = list(streaming_batches(stream, plan(documents_per_unit=2), steps=2))
    assert lengths_of(batches) == [[6 + 7] * 4] * 2
    assert documents_of(batches) == [8, 8]
