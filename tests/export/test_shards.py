"""Safetensors files written in any order: what other programs find in them, and how missing data is noticed."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ds_finetune.errors import ExportError
from ds_finetune.export.shards import HubTensor, ShardWriter, plan_shards


def tensors() -> dict[str, torch.Tensor]:
    """An odd number of bf16 elements before fp32 ones, a scalar, and fp16."""
    torch.manual_seed(1)
    return {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7),
        "c": torch.randn(()).half(),
        "d": torch.randn(2, 3, 4),
        "e": torch.randn(1).bfloat16(),
    }


def hub_tensors() -> list[HubTensor]:
    return [HubTensor(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors().items()]


def write_all(writer: ShardWriter, chunk: int, seed: int = 0) -> None:
    chunks = [(key, start) for key, tensor in tensors().items() for start in range(0, tensor.numel(), chunk)]
    random.Random(seed).shuffle(chunks)
    for key, start in chunks:
        writer.write(key, start, tensors()[key].reshape(-1)[start : start + chunk])


@pytest.mark.parametrize("max_bytes", [1, 40, 10**9])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_files_hold_what_was_written_in_any_order(chunk: int, max_bytes: int, tmp_path: Path) -> None:
    shards = plan_shards(hub_tensors(), max_bytes)
    writer = ShardWriter(tmp_path, shards)
    write_all(writer, chunk, seed=chunk)
    writer.finish()
    found = {key: tensor for shard in shards for key, tensor in load_file(tmp_path / shard).items()}
    assert found.keys() == tensors().keys()
    assert all(
        torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in tensors().items()
    )
    for shard in shards:
        with safe_open(tmp_path / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_the_file_is_the_one_safetensors_writes(tmp_path: Path) -> None:
    """The same header, padding and data, where the order of safetensors (wide dtypes first, then by name) is also ours."""
    ordered = {key: tensors()[key] for key in ("b", "d", "a")}
    save_file(ordered, tmp_path / "theirs", metadata={"format": "pt"})
    writer = ShardWriter(tmp_path, {"ours": [t for t in hub_tensors() if t.key in ordered]})
    for key, tensor in ordered.items():
        writer.write(key, 0, tensor.reshape(-1))
    writer.finish()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_file_is_closed_when_the_next_tensor_would_exceed_it() -> None:
    sizes = {tensor.key: tensor.num_bytes for tensor in hub_tensors()}
    assert sizes == {"a": 30, "b": 28, "c": 2, "d": 96, "e": 2}
    shards = plan_shards(hub_tensors(), 60)
    assert [*shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [[tensor.key for tensor in tensors] for tensors in shards.values()] == [["a", "b", "c"], ["d"], ["e"]]
    assert [*plan_shards(hub_tensors(), 158)] == ["model.safetensors"]


def test_the_index_names_the_file_of_each_tensor(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, plan_shards(hub_tensors(), 60))
    write_all(writer, 2)
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 158}
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert index["weight_map"] == {"a": first, "b": first, "c": first, "d": second, "e": third}


@pytest.mark.parametrize("ranges", [[(0, 3)], [(1, 7)], [(0, 3), (4, 7)], [(0, 3), (2, 6)], [(0, 4), (3, 7)], []])
def test_an_incomplete_tensor_is_named(ranges: list[tuple[int, int]], tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, plan_shards([HubTensor("b", (7,), torch.float32)], 100))
    for start, stop in ranges:
        writer.write("b", start, torch.zeros(stop - start))
    written = sum(stop - start for start, stop in ranges)
    with pytest.raises(
        ExportError, match=rf"1 of 1 tensors were not written exactly once: `b` \({written} of 7 elements\)"
    ):
        writer.finish()
    writer.close()


def test_what_was_not_planned_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, plan_shards([HubTensor("b", (7,), torch.float32)], 100))
    for key, start, flat in (
        ("x", 0, torch.zeros(7)),
        ("b", 0, torch.zeros(7).half()),
        ("b", 3, torch.zeros(5)),
        ("b", 0, torch.zeros(7, 1)),
    ):
        with pytest.raises((AssertionError, KeyError)):
            writer.write(key, start, flat)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ExportError, match=r"tensor `z` has shape \(0,\)"):
        ShardWriter(tmp_path, plan_shards([HubTensor("z", (0,), torch.float32)], 100))


def test_many_files_need_few_open_at_once(tmp_path: Path) -> None:
    """Each file is closed when it is full: more files than a process may have open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    planned = [HubTensor(f"t{i}", (2,), torch.float32) for i in range(400)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        writer = ShardWriter(tmp_path, plan_shards(planned, 8))
        for tensor in planned:
            writer.write(tensor.key, 0, torch.ones(2))
        writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(tmp_path.glob("*.safetensors"))) == 400
