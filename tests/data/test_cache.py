"""The data cache on a full disk, with damaged files, and its hash of the content of the rows."""

import errno
import fcntl
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.same_run import RunIdentity, changes_since_checkpoint
from ds_finetune.config.schema import RunConfig
from ds_finetune.data import prepare as preparation
from ds_finetune.data.cache import ArrayParts, find_damage, lock_folder, remove_damaged, write_folder
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.errors import CheckpointError, OutputError
from tests.running import files_of_at_most

LIMITS = TokenLimits(max_seq_len=64, vocab_size=128)


def write(path: Path, rows: int, *, other: int | None = None) -> Path:
    """Rows of one length; `other` is the number of one whose answer is another."""
    lines = [{"prompt": f"q{i:05d}", "completion": "other" if i == other else "right"} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config_of(data: Path, cache: Path, *, packing: bool = True) -> RunConfig:
    section = {"train": str(data), "cache_dir": str(cache), "packing": packing}
    return RunConfig.model_validate({"model": "m", "data": section, "output_dir": "o"})


def prepared(tokenizer: PreTrainedTokenizerBase, data: Path, cache: Path, *, packing: bool = True) -> PreparedRows:
    return prepare_rows(config_of(data, cache, packing=packing).data, "train", tokenizer=tokenizer, limits=LIMITS)


def test_one_other_token_anywhere_is_another_fingerprint_and_no_resume(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """All rows have one length, so that packing is the same: only the content tells."""
    files = [write(tmp_path / f"{i}.jsonl", 1100, other=other) for i, other in enumerate((None, None, 701))]
    first, same, other = (prepared(tokenizer, data, tmp_path, packing=False).fingerprint() for data in files)
    assert first == same != other
    config = config_of(tmp_path / "0.jsonl", tmp_path)
    tree = config.model_dump(mode="json", by_alias=True)
    state = RunState(
        step=1, skipped_steps=0, tokens_seen=0, position=(0, 1), engine={}, observers={}, values={}, data=first,
        config=tree, layout={}, versions={},
    )  # fmt: skip
    assert not [line for line in changes_since_checkpoint(state, RunIdentity(tree, same)) if "rows" in line]
    with pytest.raises(CheckpointError, match=r"training rows .* -> ") as caught:
        changes_since_checkpoint(state, RunIdentity(tree, other))
    assert first in caught.value.message
    assert other in caught.value.message


def test_a_full_disk_is_one_clear_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data, cache = write(tmp_path / "rows.jsonl", 500), tmp_path / "cache"
    with (
        files_of_at_most(10_000),
        pytest.raises(OutputError, match=rf"data cache {cache}/\w+ cannot be written: File too large") as caught,
    ):
        prepared(tokenizer, data, cache)
    assert "data.cache_dir" in caught.value.hint
    assert pickle.loads(pickle.dumps(caught.value)).hint == caught.value.hint
    assert not list(cache.glob("*/*.partial"))
    assert prepared(tokenizer, data, cache).counts.read == 500


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OutputError, match="cannot be locked") as refused, lock_folder(tmp_path / "cache"):
        pass
    assert "flock" in refused.value.hint
    assert "space" not in refused.value.hint


def test_a_cache_folder_that_cannot_be_made_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", 5)
    with pytest.raises(OutputError, match=r"data cache .*rows.jsonl/\w+ cannot be written: Not a directory"):
        prepared(tokenizer, data, data)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize("harm", [_flip, _truncate, Path.unlink], ids=["flipped", "truncated", "removed"])
@pytest.mark.parametrize(
    "name", ["whole/ids.npy", "whole/mask.npy", "whole/offsets.npy", "whole/sums.json", "packed/order.npy"]
)
def test_a_damaged_cache_is_named_and_built_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, harm: Callable[[Path], None], name: str
) -> None:
    data = write(tmp_path / "rows.jsonl", 300)
    first = prepared(tokenizer, data, tmp_path)
    assert first.notes == ()
    (path,) = tmp_path.glob(f"*/{name}")
    rows, fingerprint = [first[i].input_ids.tolist() for i in range(len(first))], first.fingerprint()
    harm(path)
    again = prepared(tokenizer, data, tmp_path)
    (note,) = again.notes
    assert note.startswith(f"data cache is damaged: {path} ")
    assert note.endswith("it is built again")
    assert [again[i].input_ids.tolist() for i in range(len(again))] == rows
    assert again.fingerprint() == fingerprint
    assert prepared(tokenizer, data, tmp_path).notes == ()


def test_a_damaged_part_of_a_killed_preparation_is_tokenised_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a tenth are written, and all of them together are too large."""
    monkeypatch.setattr(preparation, "ROWS_PER_PART", 100)
    data = write(tmp_path / "rows.jsonl", 1000)
    with files_of_at_most(16_000), pytest.raises(OutputError):
        prepared(tokenizer, data, tmp_path / "cache")
    (folder,) = (path.parent for path in tmp_path.glob("cache/*/part-000001"))
    assert len(list(folder.glob("part-*"))) == 10
    _flip(folder / "part-000001" / "ids.npy")
    again = prepared(tokenizer, data, tmp_path / "cache")
    assert again.fingerprint() == prepared(tokenizer, data, tmp_path / "new").fingerprint()
    assert not list(folder.glob("part-*"))


def test_processes_that_wait_for_the_lock_do_not_compare_again(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    write_folder(folder, {"ids": ArrayParts.of(np.arange(5))}, {})
    assert remove_damaged([folder], since=time.time()) == []
    began = time.time() - 1
    _flip(folder / "ids.npy")
    assert remove_damaged([folder], since=began) == []
    (line,) = remove_damaged([folder], since=time.time() + 1)
    assert not folder.exists()
    assert remove_damaged([folder], since=began) == [line]


def test_a_folder_has_its_name_once_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def fsync(handle: int, sync: Callable[[int], None] = os.fsync) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, (tmp_path / "whole").exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    parts = ArrayParts(np.dtype(np.int32), 7, [np.arange(4), np.arange(0), np.arange(3)])
    write_folder(tmp_path / "whole", {"ids": parts}, {"counts.json": "{}"})
    assert synced == [(name, False) for name in ("ids.npy", "counts.json", "sums.json", "whole.partial")] + [
        (tmp_path.name, True)
    ]
    assert np.load(tmp_path / "whole" / "ids.npy").tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert find_damage(tmp_path / "whole") == ""
