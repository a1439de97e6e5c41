"""Packing, the cache and the order of rows."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.cli.demo import write_demo
from ds_finetune.config.sections import DataConfig
from ds_finetune.data import units
from ds_finetune.data.batches import BatchPlan, eval_batches, training_batches
from ds_finetune.data.documents import Counts
from ds_finetune.data.prepare import Tokenisation, TokenLimits, _write_parts, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows, Row, pack
from ds_finetune.data.row_kind import KindName, RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.data.text_encoder import TextEncoder
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError, DataError, RunError
from ds_finetune.objectives.labels import IGNORE_INDEX

LIMITS = TokenLimits(max_seq_len=64, vocab_size=128)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(demo / "model"))


def rows_of(
    demo: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, limits: TokenLimits = LIMITS, **options: object
) -> PreparedRows:
    config = DataConfig.model_validate({"train": str(demo / "eval.jsonl"), "cache_dir": str(cache), **options})
    return prepare_rows(config, "train", tokenizer=tokenizer, limits=limits)


def plan(rank: int = 0, dp: int = 1, micro: int = 2, **options: object) -> BatchPlan:
    given = {
        "global_batch_size": 8,
        "micro_batch_size": micro,
        "seed": 3,
        "shuffle": True,
        "pad_token_id": 2,
        "row_len": None,
    }
    return BatchPlan(rank=rank, dp=dp, **(given | options))  # type: ignore[arg-type]


def test_packing_is_tight_complete_and_the_same_each_time() -> None:
    lengths = np.random.default_rng(0).integers(5, 600, size=3000)
    rows = pack(lengths, 2048)
    assert sorted(int(i) for row in rows for i in row) == list(range(3000))
    assert max(lengths[row].sum() for row in rows) <= 2048
    assert lengths.sum() / (len(rows) * 2048) > 0.99
    assert all(np.array_equal(a, b) for a, b in zip(rows, pack(lengths, 2048), strict=True))


def test_a_million_documents_pack_in_seconds() -> None:
    lengths = np.random.default_rng(1).integers(20, 500, size=1_000_000)
    began = time.process_time()
    rows = pack(lengths, 4096)
    assert time.process_time() - began < 20
    assert lengths.sum() / (len(rows) * 4096) > 0.999


def test_gsm8k_fills_its_rows(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-llm"))
    config = DataConfig.model_validate(
        {
            "train": str(shared_data / "gsm8k" / "train.jsonl"),
            "columns": {"prompt": "question", "completion": "answer"},
            "cache_dir": str(tmp_path),
            "workers": 1,
        }
    )
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(2048, 102_400))
    assert {name: number for name, (number, _) in rows.counts.named.entries.items()} == {
        "prompt": 7473,
        "completion": 7473,
    }
    assert rows.counts == Counts(
        read=7473,
        documents=7473,
        tokens=rows.num_tokens,
        supervised=rows.counts.supervised,
        named=rows.counts.named,
    )
    assert rows.fill_ratio(2048) >= 0.99
    lengths = [len(rows.document(number)[0]) for number in range(rows.counts.documents)]
    assert rows.mean_attended == pytest.approx(sum(n * n / 2 for n in lengths) / sum(lengths))
    assert 0.6 < rows.counts.supervised / rows.num_tokens < 0.7


def test_rows_have_every_document_once_with_labels_that_stop_at_its_end(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    packed = rows_of(demo, tokenizer, tmp_path)
    found = []
    for row in (packed[i] for i in range(len(packed))):
        starts = [*np.flatnonzero(row.position_ids == 0), len(row.input_ids)]
        for first, last in itertools.pairwise(starts):
            ids, labels = row.input_ids[first:last], row.labels[first:last]
            assert np.array_equal(row.position_ids[first:last], np.arange(last - first))
            assert labels[-1] == IGNORE_INDEX
            supervised = labels[:-1] != IGNORE_INDEX
            assert np.array_equal(labels[:-1][supervised], ids[1:][supervised])
            found.append(tokenizer.decode(ids))
        assert row.supervised == (row.labels != IGNORE_INDEX).sum()
    padded = rows_of(demo, tokenizer, tmp_path, packing=False)
    assert sorted(found) == sorted(tokenizer.decode(padded[i].input_ids) for i in range(len(padded)))
    assert len(padded) == 200


def test_labels_are_the_answer_without_the_prompt(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = rows_of(demo, tokenizer, tmp_path, packing=False)
    for row in (rows[number] for number in range(10)):
        prompt, _, answer = tokenizer.decode(row.input_ids).partition("<|assistant|>")
        assert prompt
        assert tokenizer.decode(row.labels[row.labels != IGNORE_INDEX]) == answer


def test_prompts_for_generation(demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (prompt, answer), *_ = rows_of(demo, tokenizer, tmp_path).prompts_and_answers(2)
    assert tokenizer.decode(prompt).endswith("<|assistant|>")
    assert tokenizer.decode(answer).endswith("<|eos|>")


def test_the_second_start_reads_no_raw_data(demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes((demo / "eval.jsonl").read_bytes())
    config = DataConfig.model_validate({"train": str(raw), "cache_dir": str(tmp_path / "cache")})
    first = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
    stat = raw.stat()
    raw.write_bytes(b"x" * stat.st_size)
    os.utime(raw, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
    assert np.array_equal(first[0].input_ids, again[0].input_ids)
    os.utime(raw, ns=(0, 0))
    with pytest.raises(DataError, match="line 1 column 1 is not JSON"):
        prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)


KILLED = """
import sys
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.text_encoder import TextEncoder
from ds_finetune.data.tokenizer_files import load_tokenizer
if __name__ == "__main__":
    config = DataConfig.model_validate({"train": sys.argv[1], "cache_dir": sys.argv[2], "workers": 1})
    prepare_rows(config, "train", tokenizer=load_tokenizer(sys.argv[3]), limits=TokenLimits(64, 128))
"""


READ = 14_000
"""Rows of seven parts."""


def test_a_killed_preparation_goes_on(demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """With enough in other columns to be worth a worker process."""
    (tmp_path / "killed.py").write_text(KILLED)
    cache, train = tmp_path / "cache", tmp_path / "train.jsonl"
    rows_of_demo = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()[:READ]]
    train.write_text("".join(json.dumps(row | {"note": "x" * 150}) + "\n" for row in rows_of_demo))
    assert train.stat().st_size > 2_000_000
    command = [sys.executable, str(tmp_path / "killed.py"), str(train), str(cache), str(demo / "model")]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and len(list(cache.glob("*/part-*[0-9]"))) < 3:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    parts = {part: part.stat().st_mtime_ns for part in cache.glob("*/part-*[0-9]")}
    assert len(parts) >= 3
    assert not list(cache.glob("*/whole"))
    kept = sorted(parts)[0]
    (kept / "kept").write_text("untouched")
    linked = tmp_path / "kept"
    os.link(kept / "counts.json", linked)
    config = DataConfig.model_validate({"train": str(train), "cache_dir": str(cache), "workers": 1})
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
    assert rows.counts.read == READ
    assert rows.counts.documents == READ
    assert linked.stat().st_nlink == 1


class _Deadly:
    """Ends the process in which it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_process_that_is_killed_while_it_tokenises_is_an_error(tmp_path: Path) -> None:
    """A pool of multiprocessing would wait for its answer without end."""
    with pytest.raises(RunError, match="one of 2 processes that tokenise was killed") as caught:
        list(_write_parts([(tmp_path / "part", [])], cast("Tokenisation", _Deadly()), 2))
    assert "data.workers" in caught.value.hint


@pytest.mark.parametrize(("dp", "micro"), [(1, 8), (1, 2), (2, 4), (4, 1)])
def test_the_global_batch_is_the_same_for_any_split(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, dp: int, micro: int
) -> None:
    rows = rows_of(demo, tokenizer, tmp_path, packing=False)
    wanted = [batch.row_ids for batch in training_batches(rows, plan(), start_step=0, total_rows=40)]
    split = [list(training_batches(rows, plan(rank, dp, micro), start_step=0, total_rows=40)) for rank in range(dp)]
    assert [tuple(i for part in parts for i in part.row_ids) for parts in zip(*split, strict=True)] == wanted
    assert {len(batch.micro) for part in split for batch in part} == {8 // dp // micro}
    for parts in zip(*split, strict=True):
        of_ranks = {unit: sum(part.counts[unit] for part in parts) for unit in parts[0].counts}
        assert [part.global_counts for part in parts] == [of_ranks] * dp


def test_each_epoch_has_every_row_once_in_another_order(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = rows_of(demo, tokenizer, tmp_path, packing=False)
    batches = list(training_batches(rows, plan(), start_step=0, total_rows=2 * 200))
    ids = [i for batch in batches for i in batch.row_ids]
    assert sorted(ids[:200]) == sorted(ids[200:]) == list(range(200))
    assert ids[:200] != ids[200:]
    assert (batches[-1].position.epoch, batches[-1].position.index) == (2, 0)


def test_a_later_start_gives_the_same_batches(demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = rows_of(demo, tokenizer, tmp_path, packing=False)
    whole = [batch.row_ids for batch in training_batches(rows, plan(), start_step=0, total_rows=300)]
    assert [batch.row_ids for batch in training_batches(rows, plan(), start_step=20, total_rows=300)] == whole[20:]


def test_the_last_batch_is_filled_with_empty_rows(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = rows_of(demo, tokenizer, tmp_path, packing=False)
    last = [list(training_batches(rows, plan(rank, 2, 2), start_step=0, total_rows=17))[-1] for rank in range(2)]
    assert [len(batch.row_ids) for batch in last] == [1, 0]
    assert [len(batch.micro) for batch in last] == [2, 2]
    assert last[1].num_supervised_tokens == 0
    assert last[1].global_counts == last[0].counts
    assert all(bool((micro.labels == IGNORE_INDEX).all()) for micro in last[1].micro)
    evaluated = [i for rank in range(2) for batch in eval_batches(rows, plan(rank, 2, 3)) for i in batch.row_ids]
    assert sorted(evaluated) == list(range(200))


def test_a_row_of_more_messages_than_fit_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Each answer renders all messages before it, so a row of 40,000 would take hours."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (tmp_path / "eval.jsonl").write_text(json.dumps({"messages": turns * 1_001}) + "\n")
    with pytest.raises(DataError, match=r"eval.jsonl line 1 has 2,002 messages, and a row may have at most 2,000"):
        rows_of(tmp_path, tokenizer, tmp_path / "cache")


@pytest.mark.parametrize("form", ["prompt", "text", "messages"])
def test_a_row_of_megabytes_is_refused_by_name_before_it_is_tokenised(
    form: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that may fit into a document is not, nor are columns that no layout reads. Here the limit is a thousandth."""
    assert units._MOST_CHARACTERS == 4_000_000
    monkeypatch.setattr(units, "_MOST_CHARACTERS", 4_000)
    long, short = "0123456789" * 500, "note"
    rows = {
        "prompt": lambda text: {"prompt": text, "completion": "a"},
        "text": lambda text: {"text": text},
        "messages": lambda text: {"messages": [{"role": r, "content": text} for r in ("user", "assistant")]},
    }
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(rows[form](text)) + "\n" for text in (short, long)))
    characters = "10,013" if form == "messages" else "5,001" if form == "prompt" else "5,000"
    with pytest.raises(
        DataError, match=rf"eval.jsonl line 2 has {characters} characters, and a row may have at most 4,000"
    ):
        rows_of(tmp_path, tokenizer, tmp_path / "cache")
    for name, row, limits in (
        ("unread", {"text": short, "raw": long}, LIMITS),
        ("long", {"text": long[:4_001]}, TokenLimits(max_seq_len=501, vocab_size=128)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.jsonl").write_text(json.dumps(row) + "\n")
        if name == "unread" or form == "text":
            assert (
                rows_of(tmp_path / name, tokenizer, tmp_path / "cache", limits, long_rows="auto").counts.bad_rows == 0
            )


def test_many_long_rows_are_tokenised_a_few_at_a_time(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rows of a megabyte in one call of the tokenizer would take 800 GB."""
    rows = [{"prompt": f"{number}", "completion": "0123456789" * 100} for number in range(40)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls: list[int] = []
    encode = TextEncoder.encode

    def counted(self: TextEncoder, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], bool]]:
        calls.append(sum(len(text) for text, _ in texts))
        return encode(self, texts)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    limits = TokenLimits(max_seq_len=2000, vocab_size=128)
    whole = rows_of(tmp_path, tokenizer, tmp_path / "cache", limits)
    assert max(calls) > 40_000
    calls.clear()
    monkeypatch.setattr(units, "_MOST_CHARACTERS", 4_000)
    divided = rows_of(tmp_path, tokenizer, tmp_path / "divided", limits)
    assert max(calls) < 6_000
    assert divided.counts == whole.counts
    assert np.array_equal(divided.documents.ids, whole.documents.ids)


def test_a_setting_wrong_for_all_long_rows_is_an_error_of_the_first_part(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of long rows are full by characters, with fewer rows than parts of short ones."""
    row = json.dumps({"prompt": "0123456789" * 10, "completion": 1})
    (tmp_path / "eval.jsonl").write_text(f"{row}\n" * 500)
    monkeypatch.setattr(units, "_MOST_CHARACTERS", 15_000)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path, tokenizer, tmp_path / "cache", TokenLimits(max_seq_len=200, vocab_size=128))
    assert caught.value.message.endswith("eval.jsonl line 1: column `completion` is int 1, not text")
    assert "500 rows" not in str(caught.value)


SHORT = TokenLimits(max_seq_len=20, vocab_size=128)


def test_long_dialogue_is_truncated_or_dropped_and_never_split(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    cut = rows_of(demo, tokenizer, tmp_path, SHORT, max_truncated_ratio=1)
    full = rows_of(demo, tokenizer, tmp_path)
    counts = cut.counts
    assert (counts.truncated, counts.documents, counts.tokens) == (200, 200, 200 * 20)
    assert counts.tokens + counts.truncated_tokens == full.num_tokens
    assert (
        f"200 rows truncated, which cuts off {1 - counts.tokens / full.num_tokens:.2%} of all tokens" in cut.summary()
    )
    with pytest.raises(
        DataError, match=r"truncation cuts off 28\.0% of all tokens, more than data\.max_truncated_ratio 0\.1"
    ):
        rows_of(demo, tokenizer, tmp_path, SHORT)
    with pytest.raises(
        DataError, match=r"none of the 200 rows of .* is left \(0 without supervised tokens, 200 too long\)"
    ):
        rows_of(demo, tokenizer, tmp_path, SHORT, long_rows="drop")
    with pytest.raises(DataError, match=r"eval\.jsonl line 1 is dialogue, and data\.long_rows split is for plain text"):
        rows_of(demo, tokenizer, tmp_path, SHORT, long_rows="split")
    with pytest.raises(ConfigError, match=r"long_rows split is for plain text, but data\.layout is messages"):
        rows_of(demo, tokenizer, tmp_path, SHORT, long_rows="split", layout="messages")


@pytest.mark.parametrize(
    ("characters", "lengths"),
    [
        (55, [20, 20, 18]),
        (1_000_000, [20] * 52_631 + [12]),
        (19, [20]),
        (20, [20, 2]),
        (38, [20, 20]),
        (39, [20, 20, 2]),
    ],
)
def test_every_token_of_a_long_plain_text_is_predicted_once(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, characters: int, lengths: list[int]
) -> None:
    """With the end of sequence a token more; each piece begins with the last token of the one before, as an input."""
    text = tmp_path / "book.txt"
    text.write_text(("abcde" * (characters // 5 + 1))[:characters])
    config = DataConfig.model_validate({"train": str(text), "cache_dir": str(tmp_path)})
    found = prepare_rows(config, "train", tokenizer=tokenizer, limits=SHORT)
    assert np.diff(found.documents.offsets).tolist() == lengths
    assert (found.counts.truncated_tokens, found.counts.split) == (0, int(characters > 19))
    assert found.counts.supervised == characters
    pieces = [found.document(number) for number in range(found.counts.documents)]
    assert pieces[0][0] + [token for ids, _ in pieces[1:] for token in ids[1:]] == [
        *tokenizer(text.read_text(), add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert all(before[0][-1] == after[0][0] for before, after in itertools.pairwise(pieces))
    assert "truncat" not in found.summary()


def test_packed_rows_are_told_from_rows_of_the_data(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    packed = rows_of(demo, tokenizer, tmp_path, packing=True)
    assert packed.summary().startswith(f"{len(packed):,} packed rows of 200 rows, ")
    assert rows_of(demo, tokenizer, tmp_path, packing=False).summary().startswith("200 rows, ")


def test_rows_without_anything_to_learn_are_counted_and_too_many_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    good, bad = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        '{"messages": [{"role": "user", "content": "a"}]}\n',
    )
    raw = tmp_path / "raw.jsonl"
    raw.write_text(good * 19 + bad)
    config = DataConfig.model_validate({"train": str(raw), "cache_dir": str(tmp_path)})
    assert prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS).counts.nothing_supervised == 1
    raw.write_text(good * 10 + bad * 2)
    with pytest.raises(DataError) as caught:
        prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
    assert "2 of 12 rows of" in caught.value.message
    assert "more than data.max_dropped_ratio 0.1" in caught.value.message


def test_rows_whose_prompt_fills_them_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The error is about the length, and not about the data."""
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps({"prompt": "a" * 70, "completion": "b"}) + "\n")
    config = DataConfig.model_validate({"train": str(raw), "cache_dir": str(tmp_path)})
    with pytest.raises(DataError, match=r"none of the 1 rows .* 1 whose prompt leaves no room for an answer") as caught:
        prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
    assert "raise train.max_seq_len" in caught.value.hint


def test_empty_answers_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}]
    for template, some in (("auto", [{"messages": turns}]), ("auto", rows), ("plain", rows)):
        raw.write_text("".join(json.dumps(row) + "\n" for row in some))
        config = DataConfig.model_validate({"train": str(raw), "cache_dir": str(tmp_path), "template": template})
        found = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS)
        assert found.counts.documents == len(some)
        assert f"1 of {len(some)} rows have an empty answer" in "\n".join(row_notes(found.counts))


@pytest.mark.parametrize("character", ["\ufeff", "\ufffd", "\0", "\x1b", "\x93", "\uffff"])
def test_characters_of_a_wrong_conversion_are_counted(
    character: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Characters that no keyboard writes, at the beginning and inside a text; other rare ones have no note."""
    texts = [f"{character}ab", f"a{character}b", "a\tb\n\x0c", "\N{NO-BREAK SPACE}\N{SOFT HYPHEN}", "\\x00 \\ufeff"]
    rows = [{"prompt": text, "completion": "c"} for text in texts] + [{"prompt": "c", "completion": "d", "x": "\0"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate(
        {"train": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache"), "template": "plain"}
    )
    counts = prepare_rows(config, "train", tokenizer=tokenizer, limits=LIMITS).counts
    (note,) = [note for note in row_notes(counts) if "wrong conversion" in note]
    assert note.startswith("2 of 6 rows ")
    assert note.endswith("rows.jsonl line 1")


def test_rows_that_the_tokenizer_does_not_know_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in (("1", "2"), ("1\n", "2"), ("1", "\u4e8c"))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {"train": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")}
    prepared = prepare_rows(DataConfig.model_validate(tree), "train", tokenizer=tokenizer, limits=LIMITS)
    (note,) = [note for note in row_notes(prepared.counts) if "does not know" in note]
    assert note.startswith("2 of 3 rows ")
    assert note.endswith("rows.jsonl line 2")


def test_padding_is_a_document_of_its_own_for_attention_in_both_directions() -> None:
    ids = np.arange(5, dtype=np.int32)
    row = Row(input_ids=ids, position_ids=ids, labels=np.full(5, IGNORE_INDEX, dtype=np.int32), supervised=0)
    (joined,), (separate,) = (
        next(eval_batches(cast(Any, [row]), plan(micro=1, separates_padding=separates))).micro
        for separates in (False, True)
    )
    assert joined.documents is None
    assert joined.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert separate.documents == ((5, 3),)
    assert separate.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


@pytest.mark.parametrize("kind", ["dialogue", "pairs"])
def test_bad_rows_are_listed_or_dropped(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, kind: KindName) -> None:
    good = {"prompt": "2+2?"} | ({"completion": "4"} if kind == "dialogue" else {"chosen": "4", "rejected": "5"})
    lines = [json.dumps(good)] * 60
    lines[3], lines[7], lines[9] = (
        json.dumps(good | {"prompt": 5}),
        '{"prompt": "2',
        json.dumps(good | {"prompt": None}),
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    given = DataConfig(train=(str(tmp_path / "rows.jsonl"),), cache_dir=str(tmp_path / "cache"))
    prepare = partial(prepare_rows, purpose="train", tokenizer=tokenizer, limits=LIMITS, kind=RowKind(kind))
    with pytest.raises(DataError) as caught:
        prepare(given)
    first, *others = caught.value.message.splitlines()
    assert first == "3 of 60 rows are bad:"
    assert [line.split(str(tmp_path))[1].split(":")[0].split(" column")[0].removesuffix(" has") for line in others] == [
        f"/rows.jsonl line {number}" for number in (4, 8, 10)
    ]
    assert caught.value.hint.endswith("or set data.bad_rows: drop")
    with pytest.raises(DataError) as caught:
        prepare(given.model_copy(update={"max_dropped_ratio": 0.01}))
    assert "data.bad_rows" not in caught.value.hint
    dropping = given.model_copy(update={"bad_rows": "drop"})
    rows = prepare(dropping)
    assert (rows.counts.read, rows.counts.bad_rows, rows.num_units) == (60, 3, 57)
    assert [note for note in row_notes(rows.counts) if "line 8" in note]
    with pytest.raises(
        DataError, match=r"3 of 60 rows of .* are dropped \(.*3 bad\), more than data.max_dropped_ratio"
    ):
        prepare(dropping.model_copy(update={"max_dropped_ratio": 0.01}))


def test_a_cause_of_bad_rows_is_printed_once_and_no_hint_leads_back(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """All 30 rows are bad alike: dropping them leaves none, and then only the rows can be corrected."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": 5, "completion": "x"}\n' * 30)
    given = DataConfig(train=(str(tmp_path / "rows.jsonl"),), cache_dir=str(tmp_path / "cache"))
    prepare = partial(prepare_rows, purpose="train", tokenizer=tokenizer, limits=LIMITS)
    with pytest.raises(DataError) as caught:
        prepare(given)
    head, cause, rest = caught.value.message.splitlines()
    assert (head, rest) == ("30 of 30 rows are bad:", "  and 10 more")
    assert "rows.jsonl line 1:" in cause
    assert cause.endswith(" (and 19 rows like it)")
    assert "drop" not in caught.value.hint
    with pytest.raises(DataError, match="none of the 30 rows") as caught:
        prepare(given.model_copy(update={"bad_rows": "drop"}))
    assert caught.value.hint == "correct the bad rows, which data.bad_rows error lists"


def test_truncation_is_not_to_be_replaced_by_dropping_too_many(
    demo: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """All 200 rows are too long: dropping them is refused too."""
    with pytest.raises(DataError) as caught:
        rows_of(demo, tokenizer, tmp_path, SHORT)
    assert caught.value.hint == "raise train.max_seq_len, or raise data.max_truncated_ratio"


def test_rows_that_the_template_refuses_are_bad_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages[0].content == 'no' %}{{ raise_exception('refused') }}{% endif %}" + str(tokenizer.chat_template)
    )
    texts = ["yes"] * 40
    texts[5] = texts[31] = "no"
    rows = [{"prompt": text, "completion": "4"} for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = DataConfig(
        train=(str(tmp_path / "rows.jsonl"),), template=str(template), cache_dir=str(tmp_path / "c"), bad_rows="drop"
    )
    counts = prepare_rows(given, "train", tokenizer=tokenizer, limits=LIMITS).counts
    assert [error.split(": ")[0][-7:] for error in counts.bad] == [" line 6", "line 32"]
    assert counts.documents == 38
