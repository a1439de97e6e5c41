"""Splits: of folders by the names of their files, of hub data sets by name; and a hub that does not answer."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from ds_finetune.data.sources import find_sources, read_records
from ds_finetune.errors import DataError, ModelError
from ds_finetune.foreign.hub_access import hub_problem, without_password
from ds_finetune.model.build.skeleton import resolve_folder


def rows_of(path: str, purpose: str) -> list[str]:
    return [record["text"] for source in find_sources([path], purpose=purpose) for _, record in read_records(source)]


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(2)))
    return folder


TRAIN_AND_TEST = ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl")


@pytest.mark.parametrize(
    ("names", "purpose", "split", "read"),
    [
        (TRAIN_AND_TEST, "train", "", TRAIN_AND_TEST[:1]),
        (TRAIN_AND_TEST, "eval", "", TRAIN_AND_TEST[1:]),
        (TRAIN_AND_TEST, "train", ":test", TRAIN_AND_TEST[1:]),
        (("train/a.jsonl", "dev/a.jsonl", "test/a.jsonl"), "eval", "", ("dev/a.jsonl",)),
        (("train/a.jsonl", "dev/a.jsonl", "test/a.jsonl"), "train", "", ("train/a.jsonl",)),
        (("more.jsonl", "train.jsonl"), "train", "", ("more.jsonl", "train.jsonl")),
        (("contest.jsonl", "evaluate.jsonl"), "train", "", ("contest.jsonl", "evaluate.jsonl")),
        (("a.jsonl", "b.jsonl"), "eval", "", ("a.jsonl", "b.jsonl")),
    ],
)
def test_a_folder_gives_the_files_of_one_split(
    tmp_path: Path, names: tuple[str, ...], purpose: str, split: str, read: tuple[str, ...]
) -> None:
    place = f"{write(tmp_path, *names)}{split}"
    assert rows_of(place, purpose) == [f"{name} {i}" for name in read for i in range(2)]
    notes = {source.note for source in find_sources([place], purpose=purpose)}
    assert [note.partition(" is read, ")[2] for note in notes] == (
        [f"{len(read)} of {len(names)} files"] if read != names else [""]
    )


@pytest.mark.parametrize(
    ("names", "purpose", "split", "message"),
    [
        (("train.jsonl",), "eval", "", "has no held-out split: its files are of train"),
        (("test.jsonl",), "train", "", "has no training split: its files are of test"),
        (
            ("train.jsonl", "test.jsonl", "more.jsonl"),
            "train",
            "",
            "has files of test, train, and 1 files whose names contain no split",
        ),
        (("train.jsonl", "test.jsonl"), "eval", ":validation", "has no split `validation`"),
        (("train.jsonl", "test.jsonl"), "eval", ":main:test", "has no subsets"),
    ],
)
def test_a_folder_whose_split_is_not_clear(
    tmp_path: Path, names: tuple[str, ...], purpose: str, split: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(f"{write(tmp_path, *names)}{split}", purpose)
    assert message in caught.value.message
    assert caught.value.hint


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Data sets that `datasets` has in its cache, and no hub: `org/both` with train and test, `org/one` with train
    alone.
    """
    datasets.disable_progress_bars()
    for name, splits in (("both", ("train", "test")), ("three", ("train", "test", "validation")), ("one", ("train",))):
        folder = write(tmp_path / name, *(f"{split}.jsonl" for split in splits))
        datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        (tmp_path / "cache" / name).rename(tmp_path / "cache" / f"org___{name}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize(
    ("place", "purpose", "split"),
    [
        ("org/both", "train", "train"),
        ("org/both", "eval", "test"),
        ("org/three", "eval", "validation"),
        ("org/both:test", "train", "test"),
        ("org/both:default:test", "train", "test"),
        ("org/one:train", "eval", "train"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_hub_data_set_gives_the_split_that_fits(place: str, purpose: str, split: str) -> None:
    assert rows_of(place, purpose) == [f"{split}.jsonl {i}" for i in range(2)]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("org/one", "data set `org/one` has no held-out split: its splits are train"),
        ("org/one:test", "data set `org/one` has no split `test`"),
        ("org/one:a:b:c", "is not a valid data set name"),
        ("org/none", "is neither a file nor in the cache of `datasets`, and HF_HUB_OFFLINE is set"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_hub_data_set_without_the_split(place: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(place, "eval")
    assert message in caught.value.message
    assert caught.value.hint


def test_training_and_evaluation_data_of_one_hub_id_are_cached_apart() -> None:
    names = [find_sources(["org/both"], purpose=purpose)[0].fingerprint for purpose in ("train", "eval")]
    assert names[0] != names[1]


def test_a_hub_that_does_not_answer_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections and never answers, as behind a firewall: one probe for model, tokenizer and data."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("ds_finetune.foreign.hub_access._REQUEST_SECONDS", 0.5)
        with pytest.raises(
            ModelError, match=r"neither a folder nor in the hub's cache .*, and http://127.* cannot be reached"
        ):
            resolve_folder("org/none")
        with pytest.raises(DataError, match=r"nor in the cache of `datasets`, and http://127.* cannot be reached"):
            rows_of("org/none", "train")
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_hub_that_answers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_problem() == ""


def test_a_password_of_the_endpoint_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://me:s3cret@127.0.0.1:9")
    assert hub_problem().startswith("http://***@127.0.0.1:9 cannot be reached")
    assert without_password("404 for url: https://me:p@ss@hub.example/api?x=a@b") == (
        "404 for url: https://***@hub.example/api?x=a@b"
    )
