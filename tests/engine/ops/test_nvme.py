"""Parameters and optimizer states on NVMe: streamed weights reach the disk, and the steps equal those in memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
from ds_finetune.model.weights.load import initialise_weights
from tests.json_files import change_json
from tests.running import build_ops, metrics, start, tiny_task, torchrun

WIDE = {"hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 512}
"""Slices above 1 MiB on each of two ranks, which DeepSpeed swaps."""


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder in memory, whose direct reads take any address."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("async_io cannot be built here: libaio is missing (Debian: libaio-dev)")
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm on this machine")
    build_ops("async_io", "cpu_adam")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def _wide_task(folder: Path, zero: dict[str, Any]) -> Path:
    run_file = tiny_task(
        folder, deepspeed={"zero_optimization": zero}, model={"path": str(folder / "model"), "weights": "load"}
    )
    written = folder / "model" / "config.json"
    change_json(written, WIDE)
    model = build_skeleton(read_hf_config(str(folder / "model")), attention="sdpa", dtype=torch.float32, device="cpu")
    initialise_weights(model, seed=3)
    model.save_pretrained(folder / "model")
    return run_file


def test_parameters_and_optimizer_on_nvme_equal_those_in_memory(tmp_path: Path, disk: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    offloads: dict[str, dict[str, Any]] = {
        "memory": {"stage": 2},
        "both": {
            "stage": 3,
            "sub_group_size": 1_000_000,
            "offload_optimizer": nvme,
            "offload_param": nvme | {"buffer_size": 1_100_000},
        },
        "parameters": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": nvme | {"buffer_size": 1_100_000},
        },
    }
    losses = {}
    for name, zero in offloads.items():
        done = start(torchrun("ds_finetune/train.py", str(_wide_task(tmp_path / name, zero))))
        assert done.returncode == 0, done.stderr[-3000:]
        losses[name] = [record["train/loss"] for record in metrics(tmp_path / name)]
        if name != "memory":
            assert list(disk.rglob("*_param.tensor.swp")), "nothing was swapped"
    assert losses["both"] == pytest.approx(losses["memory"], rel=1e-6)
    assert losses["parameters"] == pytest.approx(losses["memory"], rel=1e-6)


def test_a_buffer_too_small_is_named(tmp_path: Path, disk: Path) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(disk), "buffer_size": 1000}}
    done = start(torchrun("ds_finetune/train.py", str(_wide_task(tmp_path, zero))))
    assert (
        "offload_param.buffer_size 1,000 elements is smaller than a rank's shard of `model.layers.1.mlp.experts.gate_up_proj`"
        in done.stderr
    )
