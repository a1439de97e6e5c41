"""Streaming: ranks see different rows, each pass has them all, and no rank runs out."""

import json
import weakref
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.data import stream as streaming
from ds_finetune.data.batches import Batch, BatchPlan, MicroBatch
from ds_finetune.data.prepare import TokenLimits
from ds_finetune.errors import DataError

LIMITS = TokenLimits(64, 128)


def batches(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, rank: int, dp: int, steps: int, packing: bool = False
) -> list[Batch]:
    config = DataConfig.model_validate({"train": str(path), "packing": packing})
    plan = BatchPlan(8, 2, rank, dp, 0, shuffle=True, pad_token_id=2, row_len=64 if packing else None)
    return list(
        streaming.streaming_batches(
            streaming.open_stream(config, "train", tokenizer=tokenizer, limits=LIMITS), plan, steps=steps
        )
    )


def texts(found: list[Batch], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [
        tokenizer.decode(row, skip_special_tokens=True)
        for batch in found
        for micro in batch.micro
        for row in micro.input_ids
    ]


def write(path: Path, number: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) + "\n" for i in range(number)))
    return path


@pytest.mark.parametrize("at_a_time", [5, 1000])
def test_a_pass_over_all_ranks_has_every_row_once(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(streaming, "RECORDS_AT_A_TIME", at_a_time)
    path = write(tmp_path / "rows.jsonl", 32)
    found = [texts(batches(path, tokenizer, rank=rank, dp=2, steps=8), tokenizer) for rank in range(2)]
    for passed in (slice(0, 16), slice(16, 32)):
        assert sorted(found[0][passed] + found[1][passed]) == sorted(f"q{i}a{i}" for i in range(32))
    assert found[0][:16] != found[0][16:]
    assert found == [texts(batches(path, tokenizer, rank=rank, dp=2, steps=8), tokenizer) for rank in range(2)]


def test_ranks_with_unequal_shares_run_equally_often(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 9)
    for packing in (False, True):
        found = [batches(path, tokenizer, rank=rank, dp=2, steps=5, packing=packing) for rank in range(2)]
        assert [[len(batch.micro) for batch in part] for part in found] == [[2] * 5] * 2
        assert all(batch.num_supervised_tokens > 0 for part in found for batch in part)


def test_nothing_is_read_before_it_is_needed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "RECORDS_AT_A_TIME", 8)
    path = write(tmp_path / "rows.jsonl", 20)
    with path.open("a") as file:
        file.write("{broken\n")
    config = DataConfig.model_validate({"train": str(path), "packing": False})
    plan = BatchPlan(8, 2, 0, 1, 0, shuffle=False, pad_token_id=2, row_len=None)
    endless = streaming.streaming_batches(
        streaming.open_stream(config, "train", tokenizer=tokenizer, limits=LIMITS), plan, steps=9
    )
    assert len(list(islice(endless, 2))) == 2
    with pytest.raises(DataError, match="line 21 column 2 is not JSON"):
        next(endless)


def test_a_chunk_is_released_before_the_next_is_tokenised(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, alive = list[weakref.ref[Any]](), list[int]()
    tokenise = streaming.tokenise_records

    def counted(*given: Any) -> Any:
        alive.append(sum(each() is not None for each in made))
        documents, counts = tokenise(*given)
        made.append(weakref.ref(documents))
        return documents, counts

    monkeypatch.setattr(streaming, "RECORDS_AT_A_TIME", 8)
    monkeypatch.setattr(streaming, "tokenise_records", counted)
    batches(write(tmp_path / "t.jsonl", 64), tokenizer, rank=0, dp=1, steps=8)
    assert len(alive) == 1 + 64 // 8, "the first call samples rows to report on"
    assert not any(alive)


def test_fewer_rows_than_ranks_is_an_error_not_a_hang(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 1)
    with pytest.raises(DataError, match="rank 1 of 2 finds no row in"):
        batches(path, tokenizer, rank=1, dp=2, steps=1)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_goes_on_from_any_batch(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    """In the middle of a stretch, at its end, and in a later pass; what came before is not tokenised again."""
    monkeypatch.setattr(streaming, "RECORDS_AT_A_TIME", 7)
    path = write(tmp_path / "rows.jsonl", 45)
    config = DataConfig.model_validate({"train": str(path), "packing": packing})
    plan = BatchPlan(8, 2, 1, 2, 0, shuffle=True, pad_token_id=2, row_len=64 if packing else None)
    rows = streaming.open_stream(config, "train", tokenizer=tokenizer, limits=LIMITS)
    whole = list(streaming.streaming_batches(rows, plan, steps=12))
    assert whole[-1].position.epoch > 0
    for done in range(1, 12):
        rest = list(streaming.streaming_batches(rows, plan, steps=12, start_step=done, start=whole[done - 1].position))
        assert texts(rest, tokenizer) == texts(whole[done:], tokenizer)
        assert [batch.position for batch in rest] == [batch.position for batch in whole[done:]]


def test_the_costliest_row_of_a_step_comes_first(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Steps keep their rows and positions, so a run resumes as without costs."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q" * (i % 7), "completion": f"a{i}"}) + "\n" for i in range(40)))
    rows = streaming.open_stream(
        DataConfig.model_validate({"train": str(path), "packing": True}), "train", tokenizer=tokenizer, limits=LIMITS
    )
    plan = BatchPlan(8, 1, 1, 2, 0, shuffle=True, pad_token_id=2, row_len=24)
    costed = replace(plan, streamed_row_cost=lambda row: float((row.document_lengths**2).sum()))
    in_order, sorted_rows = (
        list(streaming.streaming_batches(rows, each, steps=3, start_step=1)) for each in (plan, costed)
    )
    assert texts(in_order, tokenizer) != texts(sorted_rows, tokenizer)
    for before, after in zip(in_order, sorted_rows, strict=True):
        assert before.position == after.position
        assert before.counts == after.counts
        assert sorted(texts([before], tokenizer)) == sorted(texts([after], tokenizer))
        costs = [sum(n**2 for n in _lengths(micro)) for micro in after.micro]
        assert costs == sorted(costs, reverse=True)


def _lengths(micro: MicroBatch) -> list[int]:
    """Tokens of the documents of one row, without its padding."""
    assert micro.documents is not None
    (lengths,) = micro.documents
    return list(lengths) if int(micro.lengths) == sum(lengths) else list(lengths[:-1])


def test_the_fingerprint_of_a_stream_changes_with_its_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """By all that makes rows of records: a checkpoint counts rows, which would be others."""
    path, template = write(tmp_path / "rows.jsonl", 3), tmp_path / "template.jinja"
    written = "{% for each in messages %}{{ each.role }}: {{ each.content }}{{ eos_token if each.role == 'assistant' }}{% endfor %}"
    template.write_text(written)

    def fingerprint(limits: TokenLimits = LIMITS, **settings: object) -> str:
        config = DataConfig.model_validate({"train": str(path)} | settings)
        return streaming.open_stream(config, "train", tokenizer=tokenizer, limits=limits).fingerprint()

    others = (
        {},
        {"packing": False},
        {"train_on": "all"},
        {"template": "plain"},
        {"long_rows": "drop"},
        {"template": str(template)},
    )
    found = [fingerprint(TokenLimits(32, 128)), *(fingerprint(**settings) for settings in others)]
    template.write_text(f"{written}!")
    found += [fingerprint(template=str(template))]
    assert len(set(found)) == len(found)
    assert fingerprint(max_dropped_ratio=0.5, cache_dir="elsewhere") == found[1]
