"""Which files of a hub repository are needed: a download of only these is complete."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from ds_finetune.errors import ModelError
from ds_finetune.export.base_folder import find_base
from ds_finetune.model.build.skeleton import resolve_folder

COMMIT = "0" * 40
READ = (
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "vocab.txt",
    "tiktoken.model",
    "model-00001-of-00001.safetensors",
)
NOT_READ = ("README.md", "own.py", "original/model--00001-of-00001.safetensors", "metal/model.bin")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of huggingface_hub after a download of `READ`, from a repository that has `NOT_READ` as well."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--name"
    folder = repository / "snapshots" / COMMIT
    files = {name: {"size": 2, "blob_id": "1"} for name in (*READ, *NOT_READ)}
    for path, text in (
        (repository / "refs" / "main", COMMIT),
        (repository / "trees" / f"{COMMIT}.json", json.dumps({"format_version": 1, "files": files})),
        *((folder / name, "{}") for name in READ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_weights_in_folders_of_a_repository_are_not_needed(snapshot: Path) -> None:
    assert resolve_folder("org/name") == snapshot
    assert find_base("org/name") == snapshot


def test_a_download_without_its_weights_is_not_complete(snapshot: Path) -> None:
    (snapshot / READ[-1]).unlink()
    with pytest.raises(ModelError, match="neither a folder nor in the hub's cache"):
        resolve_folder("org/name")
    assert find_base("org/name") is None
