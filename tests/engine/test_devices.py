"""Which GPU a rank takes, and that ranks which cannot work together are refused before a process group opens."""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_finetune.engine import devices
from ds_finetune.engine.devices import (
    allocator_settings,
    choose_device,
    deepspeed_local_rank,
    present_gpus,
    visible_device,
)
from ds_finetune.engine.groups.default_group import JoinedRanks, check_same_devices, process_group
from ds_finetune.errors import ConfigError, LaunchError, RunError
from ds_finetune.system.info import Gpu
from ds_finetune.system.world import World

SOON = timedelta(seconds=0.2)


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`choose_device` tells DeepSpeed by a variable, and groups export who they are."""
    kept = dict(os.environ)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    os.environ.clear()
    os.environ.update(kept)


CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
"""Architectures of PyPI's torch 2.13."""


def _gpus(monkeypatch: pytest.MonkeyPatch, *, usable: int, present: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
    # A build for CUDA would ask the driver whether its kernels fit the GPU.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    monkeypatch.setattr(devices, "present_gpus", lambda: present)


@pytest.mark.parametrize(
    ("wanted", "usable", "present", "device"),
    [
        (None, 2, 2, "cuda"),
        ("cuda", 2, 2, "cuda"),
        ("cpu", 2, 2, "cpu"),
        ("cpu", 0, 2, "cpu"),
        (None, 0, 0, "cpu"),
        ("", 0, 0, "cpu"),
    ],
)
def test_the_device_is_what_is_asked_for_and_there(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, usable: int, present: int, device: str
) -> None:
    _gpus(monkeypatch, usable=usable, present=present)
    if wanted is not None:
        monkeypatch.setenv("DS_ACCELERATOR", wanted)
    assert choose_device() == os.environ["DS_ACCELERATOR"] == device


@pytest.mark.parametrize(
    ("wanted", "present", "message"),
    [
        (
            "cuda",
            0,
            f"DS_ACCELERATOR is cuda on {socket.gethostname()}, and torch {torch.__version__} can use no GPU: ",
        ),
        (None, 8, f"{socket.gethostname()} has 8 NVIDIA GPUs, and torch {torch.__version__} can use no GPU: "),
        ("xpu", 0, "DS_ACCELERATOR is `xpu`"),
    ],
)
def test_a_gpu_that_cannot_be_used_never_becomes_the_cpu(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, present: int, message: str
) -> None:
    _gpus(monkeypatch, usable=0, present=present)
    if wanted is not None:
        monkeypatch.setenv("DS_ACCELERATOR", wanted)
    with pytest.raises(ConfigError) as caught:
        choose_device()
    assert caught.value.message.startswith(message)
    assert caught.value.message != message or wanted == "xpu", "the cause is missing"
    assert "cpu" in caught.value.hint


def test_an_intel_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch for Intel's GPUs DeepSpeed would take one, and this program the CPU."""
    _gpus(monkeypatch, usable=0, present=0)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="has an Intel GPU, and ds-finetune supports only GPUs of NVIDIA and AMD"):
        choose_device()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device() == "cpu"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), CUDA_13, False),
        ((6, 1), CUDA_13, False),
        ((7, 5), CUDA_13, True),
        ((8, 9), CUDA_13, True),
        ((12, 1), CUDA_13, True),
        ((13, 0), CUDA_13, True),
        ((7, 0), "sm_50 sm_60 sm_70 sm_75", True),
        ((10, 3), "sm_80 sm_90a sm_100a", False),
        ((9, 0), "sm_80 sm_90a sm_100a", True),
        ((9, 0), "", False),
    ],
)
def test_a_torch_without_kernels_for_the_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: str, runs: bool
) -> None:
    """PyPI's torch has none for a V100 since CUDA 13; the first operation would fail after the model is loaded."""
    _gpus(monkeypatch, usable=2, present=2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {1: capability}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", {1: "Tesla V100"}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    if runs:
        assert choose_device() == "cuda"
        return
    with pytest.raises(ConfigError) as caught:
        choose_device()
    dotted = ".".join(map(str, capability))
    assert caught.value.message == (
        f"Tesla V100 has compute capability {dotted}, and torch {torch.__version__} has kernels for "
        + (", ".join(built.split()) or "no GPU")
    )
    assert "install a torch with kernels for this GPU" in caught.value.hint
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device() == "cpu"


GROWING = "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "release", "is_initialised", "chosen"),
    [
        ({}, "6.8.0-generic", False, GROWING),
        ({}, "5.15.167.4-microsoft-standard-WSL2", False, ""),
        ({}, "6.8.0-generic", True, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "6.8.0-generic", False, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "6.8.0-generic", False, "backend:cudaMallocAsync"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, "6.8.0-generic", False, ""),
        ({"DS_ACCELERATOR": "cpu"}, "6.8.0-generic", False, ""),
    ],
)
def test_segments_grow_where_nothing_speaks_against_it(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], release: str, is_initialised: bool, chosen: str
) -> None:
    _gpus(monkeypatch, usable=1, present=1)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialised)
    monkeypatch.setattr(devices, "_check_kernels", lambda _: None)
    choose_device()
    assert allocator_settings() == chosen


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 has no function that returns them"
)
def test_torch_reads_the_settings_of_its_allocator_when_it_needs_them() -> None:
    """Not when it is imported: `choose_device` sets them later."""
    code = f"import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = '{GROWING}'; " + (
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environ).strip() == GROWING


def test_gpus_that_are_hidden_on_purpose_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert present_gpus(tmp_path) == 2
    monkeypatch.setattr(devices, "query_gpus", lambda: [Gpu("RTX 4090", "GPU-1", None, None)])
    assert present_gpus(tmp_path / "none") == 1, "WSL 2 has no such files"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert present_gpus(tmp_path) == 0


@pytest.mark.parametrize(("visible", "local_ranks"), [(8, [0, 1, 7]), (1, [0, 1, 7])])
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_ranks: list[int]
) -> None:
    _gpus(monkeypatch, usable=visible, present=visible)
    wanted = [0] * len(local_ranks) if visible == 1 else local_ranks
    assert [visible_device(rank) for rank in local_ranks] == wanted


def test_more_ranks_than_visible_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, usable=2, present=2)
    with pytest.raises(LaunchError, match="local rank 2 has no GPU: this host shows 2 GPUs"):
        visible_device(2)


def test_deepspeed_sees_the_number_of_the_gpu_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Open MPI it asserts that both variables are equal (0.19.8, runtime/engine.py:1962)."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    with deepspeed_local_rank(0):
        assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("0", "0")
    assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("3", "3")


def _rank(device: str, gpu: str = "", host: str = "a") -> str:
    return json.dumps({"device": device, "gpu": gpu, "host": host})


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([_rank("cuda", "x"), _rank("cpu", host="b")], "rank 0 on a uses cuda and rank 1 on b uses cpu"),
        ([_rank("cpu"), _rank("cuda", "x", "b")], "rank 0 on a uses cpu and rank 1 on b uses cuda"),
        ([_rank("cuda", "x"), _rank("cuda", "y"), _rank("cuda", "x")], "ranks 0 and 2 on a use the same GPU x"),
    ],
)
def test_ranks_that_cannot_work_together_are_named(ranks: list[str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_same_devices(ranks)
    assert caught.value.message == message


def test_ranks_that_can_work_together_are_not_refused() -> None:
    """`check_same_devices` raises where it refuses, as in the test above."""
    check_same_devices([_rank("cpu"), _rank("cpu")])
    check_same_devices([_rank("cuda", "x"), _rank("cuda", "y"), _rank("cuda", "z", "b")])


def test_ranks_exchange_texts_through_the_store() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        ranks = [JoinedRanks(World(r, 3, r, 3, "t"), store) for r in range(3)]
        sent = [pool.submit(ranks[r].exchange, "x", f"of {r}", timeout=SOON * 50) for r in range(3)]
        assert [one.result() for one in sent] == [["of 0", "of 1", "of 2"]] * 3


def test_ranks_that_do_not_write_are_named() -> None:
    with pytest.raises(RunError, match=r"rank 0 has waited 0:00:00.2\d* for the operators of ranks 1, 2") as caught:
        JoinedRanks(World(0, 3, 0, 3, "t"), dist.HashStore()).exchange("operators", "mine", timeout=SOON)
    # The time is the caller's, which no key of the run file changes in most calls.
    assert "watchdog" not in caught.value.hint


def test_no_process_group_is_opened_by_ranks_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host's GPU has failed: its rank would open gloo, and the others NCCL."""
    store = dist.HashStore()
    store.set("device/1", _rank("cuda", "x", "b"))
    monkeypatch.setattr(devices.socket, "gethostname", lambda: "a")
    with (
        pytest.raises(LaunchError, match="rank 0 on a uses cpu and rank 1 on b uses cuda"),
        process_group(World(0, 2, 0, 1, "t"), "cpu", store, timeout=SOON),
    ):
        pass
    assert not dist.is_initialized()
