"""Folders that are not what they say: one clear error that names the file, whatever its bytes."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ds_finetune.cli.main import main
from ds_finetune.errors import ModelError
from ds_finetune.model.build.hub_folder import HubFolder, check_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with an index."""
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16()}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.tensor(7.0), "d": torch.ones(1, dtype=torch.int64)}, tmp_path / "model-2.safetensors")
    _index(tmp_path, a="model-1.safetensors", b="model-1.safetensors", c="model-2.safetensors", d="model-2.safetensors")
    return tmp_path


def _index(folder: Path, **weight_map: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_all_files_are_one_name_space(folder: Path) -> None:
    hub = HubFolder(folder)
    assert dict(hub.shapes) == {"a": (2, 3), "b": (2,), "c": (), "d": (1,)}
    assert torch.equal(hub.read("a", 1, 4), torch.arange(1.0, 5.0))
    assert torch.equal(hub.rows("a", 1, 2, (slice(1, 3),)), torch.tensor([[4.0, 5.0]]))
    assert hub.read("c", 0, 1).item() == 7
    assert hub.dtype("b") == torch.bfloat16
    with pytest.raises(ModelError, match=r"has 1 tensors of dtypes that are not for weights: `d` is torch\.int64"):
        hub.left_over(hub.shapes, model="it", may_be=lambda _: False)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_may_not_name_files_elsewhere(name: str, folder: Path) -> None:
    _index(folder, a=name)
    with pytest.raises(ModelError, match=r"names (files outside its folder|1 files that are not there)"):
        HubFolder(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")]
)
def test_an_index_that_is_none(text: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=rf"{INDEX} is not an index of safetensors"):
        HubFolder(folder)


def test_what_the_index_names_must_be_there(folder: Path) -> None:
    _index(folder, a="model-1.safetensors", e="model-2.safetensors")
    with pytest.raises(ModelError, match=r"names 1 tensors that are not there: `e` in model-2\.safetensors"):
        HubFolder(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names 1 files that are not there: model-2\.safetensors"):
        HubFolder(folder)


def test_whole_weights_beside_an_index_with_shards_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.zeros(2, 3)}, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"has weights twice: model\.safetensors, .* the shards listed in .*index\.json"
    ) as refused:
        check_folder(folder)
    assert refused.value.hint
    assert main(["eval", str(folder), "--data", str(folder / "rows.jsonl")]) == 2
    assert "the shards listed in" in capsys.readouterr().err
    _index(folder, a="model.safetensors")
    check_folder(folder)
    assert dict(HubFolder(folder).shapes) == {"a": (2, 3)}


def test_one_name_in_two_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"a": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(ModelError, match=r"the tensor `a` is in both .*model-1\.safetensors and .*other\.safetensors"):
        HubFolder(folder)


@pytest.mark.parametrize("kept", [0, 5, 9, 60, -1])
def test_a_truncated_file(kept: int, folder: Path) -> None:
    data = (folder / "model-1.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(data[:kept])
    with pytest.raises(ModelError, match=r"model-1\.safetensors is not a complete safetensors file: .*"):
        HubFolder(folder)


def test_random_bytes_and_flipped_ones_never_do_more_than_be_refused(folder: Path) -> None:
    rng, path = np.random.default_rng(0), folder / "model-1.safetensors"
    data = path.read_bytes()
    refused = 0
    for _ in range(200):
        broken = bytearray(data)
        for place in rng.integers(0, len(data) - 28, size=3):
            broken[place] = rng.integers(256)
        path.write_bytes(bytes(broken))
        try:
            HubFolder(folder).read("a", 0, 6)
        except ModelError:
            refused += 1
    assert refused > 100
    path.write_bytes(struct.pack("<Q", 200000) + b"[" * 200000)
    with pytest.raises(ModelError, match="is not a complete safetensors file"):
        HubFolder(folder)


def test_tensors_may_have_other_names_in_the_model(folder: Path) -> None:
    hub = HubFolder(folder, rename=lambda key: f"base.{key}" if key in "ab" else key)
    assert dict(hub.shapes) == {"base.a": (2, 3), "base.b": (2,), "c": (), "d": (1,)}
    assert torch.equal(hub.read("base.a", 1, 4), torch.arange(1.0, 5.0))
    weights = {name: shape for name, shape in hub.shapes.items() if name != "d"}
    assert hub.left_over(weights, model="it", may_be=lambda key: key == "d") == ["d"]
    with pytest.raises(ModelError, match="two tensors, `a` and `b`, for `same` of the model"):
        HubFolder(folder, rename=lambda key: "same" if key in "ab" else key)
