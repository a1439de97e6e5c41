import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_finetune.model.build.dtypes import SAFETENSORS_DTYPES
from ds_finetune.model.weights.safetensors_file import MAX_HEADER_BYTES, encode_header, header_bytes, read_header

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _file(folder: Path, tree: object) -> Path:
    text = json.dumps(tree).encode()
    (folder / "file").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    return folder / "file"


@pytest.mark.parametrize(
    "tree",
    [
        3,
        [],
        {"a": 3},
        {"a": {}},
        {"a": ENTRY | {"data_offsets": [0, 9]}},
        {"a": ENTRY | {"data_offsets": [8, 16]}},
        {"a": ENTRY | {"data_offsets": [-8, 0]}},
        {"a": ENTRY | {"shape": [-1, -2]}},
        {"a": ENTRY | {"shape": [2.0]}},
        {"a": ENTRY | {"shape": ["2"]}},
        {"a": ENTRY | {"dtype": "F4"}},
        {"a": ENTRY, "b": ENTRY},
        {"a": ENTRY | {"shape": [True, 2]}},
        {"a": ENTRY | {"data_offsets": [0]}},
        {"a": ENTRY | {"dtype": []}},
    ],
)
def test_headers_that_lie(tree: object, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"its header is not valid|lies from|is F4, not one of|its tensors end at|unpack"
    ):
        read_header(_file(tmp_path, tree))


def test_every_dtype_is_read_as_safetensors_writes_it(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, 2).to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    save_file(tensors, tmp_path / "file", metadata={"a": "b"})
    header = read_header(tmp_path / "file")
    assert {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()} == {
        name: (dtype, (3, 2)) for name, dtype in SAFETENSORS_DTYPES.items()
    }
    assert header.metadata == {"a": "b"}
    assert header.end == (tmp_path / "file").stat().st_size


def test_safetensors_reads_what_is_encoded(tmp_path: Path) -> None:
    shapes = [("b", torch.float32, (2,)), ("none", torch.int64, (0, 3)), ("a", torch.bfloat16, ())]
    head, begins = encode_header(shapes, {"c": "d"})
    data = (
        torch.arange(2.0).view(torch.uint8).numpy().tobytes()
        + torch.ones((), dtype=torch.bfloat16).view(1).view(torch.uint8).numpy().tobytes()
    )
    (tmp_path / "file").write_bytes(head + data)
    assert begins == [len(head), len(head) + 8, len(head) + 8]
    assert torch.equal(load_file(tmp_path / "file")["b"], torch.arange(2.0))
    header = read_header(tmp_path / "file")
    assert [(name, entry.dtype, entry.shape) for name, entry in sorted(header.tensors.items())] == sorted(shapes)


def test_a_file_cut_short_is_read_only_where_that_is_allowed(tmp_path: Path) -> None:
    file = _file(tmp_path, {"a": ENTRY})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"its tensors end at byte \d+, the file at \d+"):
        read_header(file)
    assert read_header(file, is_complete=False).tensors["a"].shape == (2,)


def test_a_header_may_not_be_longer_than_safetensors_allows(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    with pytest.raises(ValueError, match=r"its header has 100,000,001 bytes, more than the 100,000,000"):
        read_header(file)
    file.write_bytes(bytes(7))
    assert header_bytes(file) == 0
