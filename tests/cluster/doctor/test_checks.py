"""Checks of the doctor: exact states and words, without other machines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finetune.cluster import host_functions as host
from ds_finetune.cluster.doctor.checks import folder_checks, network_checks, rate_checks
from ds_finetune.cluster.host_checks import Check, clock_check
from ds_finetune.plan import kernels
from ds_finetune.system import info
from ds_finetune.system.info import query_gpus

LAST_WORDS = "Traceback (most recent call last):\nRuntimeError: no space\n=====\n"


def _states(found: Any) -> dict[str, str]:
    return {check.host: check.state for check in found}


def _gpus(monkeypatch: pytest.MonkeyPatch, *rows: str) -> None:
    """nvidia-smi lists these GPUs."""
    monkeypatch.setattr(info.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(info.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="\n".join(rows), returncode=0))


def test_gpus_in_use_and_without_a_compiler_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("NVIDIA H100, GPU-1, 81559, 9000, Default", "NVIDIA H100, GPU-2, 81559, 0, Exclusive_Process")
    _gpus(monkeypatch, *rows)
    monkeypatch.setattr(kernels, "triton_problem", lambda: ("", ""))
    assert [row[:3] for row in host.gpus()] == [
        ("gpus", "warn", "GPU 0 has more than 1 GiB in use"),
        ("gpus", "warn", "GPU 1 admits one process"),
    ]
    _gpus(monkeypatch, "NVIDIA H100, GPU-1, 81559, 0, Default")
    monkeypatch.setattr(kernels, "triton_problem", lambda: ("there is no C compiler (gcc or clang)", "install gcc"))
    text = "Triton cannot compile kernels: there is no C compiler (gcc or clang); auto chooses those of torch"
    assert host.gpus() == [("kernels", "warn", text, "install gcc")]


def test_the_compiler_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh -x")
    assert host.compiler([]) == []
    assert host.compiler(["cpu_adam"]) == [("kernels", "ok", "`sh` can build cpu_adam of DeepSpeed", "")]
    monkeypatch.setenv("CXX", "no-such-compiler")
    ((name, state, text, hint),) = host.compiler(["cpu_adam", "async_io"])
    assert (name, state, hint) == ("kernels", "fail", "install a C++ compiler (Debian: g++), or set CXX to its path")
    assert text == "there is no C++ compiler `no-such-compiler` to build cpu_adam and async_io of DeepSpeed"


def test_memory_of_the_host_and_of_its_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 100)
    _gpus(monkeypatch, "NVIDIA A, GPU-1, 81559, 0, Default", "NVIDIA B, GPU-2, 16384, 0, Default")
    assert [row[1] for row in host.memory(80, 10 << 30)] == ["ok", "ok"]
    assert [row[1] for row in host.memory(81, 14 << 30)] == ["warn", "warn"]
    assert [row[1] for row in host.memory(101, 17 << 30)] == ["fail", "fail"]
    assert host.memory(101, 17 << 30)[1][2] == "GPU: the run needs more than 17.00 GiB of memory, 16.0 GiB are there"


def test_memory_that_nvidia_smi_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of GPUs that share the host's memory, and of those in MIG mode."""
    shared = "NVIDIA GB10, GPU-1, [N/A], [N/A], Default"
    _gpus(monkeypatch, shared, "NVIDIA H100, GPU-2, 81559, [Insufficient Permissions], Default")
    assert [(gpu.total_bytes, gpu.used_bytes) for gpu in query_gpus()] == [(None, None), (81559 << 20, None)]
    assert not [row for row in host.gpus() if row[0] == "gpus"]
    assert [row[1] for row in host.memory(0, 90 << 30)] == ["ok", "fail"]
    _gpus(monkeypatch, shared)
    assert len(host.memory(0, 90 << 30)) == 1


def test_disk(tmp_path: Path) -> None:
    (ok,) = host.disk(str(tmp_path / "runs" / "new"), 0)
    assert (ok[0], ok[1], ok[3]) == ("disk", "ok", "")
    (full,) = host.disk(str(tmp_path), 1 << 62)
    assert (full[1], "needs 4,294,967,296.00 GiB at most" in full[2]) == ("fail", True)
    (tmp_path / "file").touch()
    ((_, state, text, _),) = host.disk(str(tmp_path / "file" / "run"), 0)
    assert (state, text) == ("fail", f"{tmp_path}/file is not a folder with write permission")


def test_digests_tell_files_apart_by_names_and_sizes(tmp_path: Path) -> None:
    for name, text in (("a/config.json", "{}"), ("a/model.safetensors", "1234"), ("b", "12")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    folder, file, absent = (str(tmp_path / name) for name in ("a", "b", "absent"))
    before = host.digests([folder, file, absent])
    assert before[absent] == ""
    assert len({*before.values()}) == 3
    assert host.digests([folder, file, absent]) == before
    (tmp_path / "a" / "config.json").rename(tmp_path / "a" / "other.json")
    (tmp_path / "b").write_text("123")
    assert not {*host.digests([folder, file]).values()} & {*before.values()}


def test_clocks_are_blamed_for_no_more_than_the_round_trip_leaves() -> None:
    assert clock_check("a", -0.001, 0.005) == Check("clock", "a", "ok", "the clock is at most 1 s off")
    assert clock_check("b", 1.4, 0.005).state == "warn"
    assert clock_check("c", 1.4, 1.0).state == "ok"
    late = clock_check("d", -3600, 0.1)
    assert (late.state, late.found) == ("fail", "the clock is -3600.00 s off, give or take 100 ms")


NO, MINE, SEEN = (False, False), (True, False), (True, True)
"""What a host says of a folder: it cannot write there, does not see the file of the first host, sees it."""


@pytest.mark.parametrize(
    ("seen", "node_local", "states"),
    [
        ({"a": SEEN, "b": SEEN}, False, {"": "ok"}),
        ({"a": SEEN, "b": SEEN}, True, {"": "warn"}),
        ({"a": SEEN, "b": MINE}, False, {"b": "fail"}),
        ({"a": SEEN, "b": MINE}, True, {"": "ok"}),
        ({"a": SEEN, "b": MINE}, None, {"": "ok"}),
        ({"a": SEEN, "b": SEEN, "c": MINE}, False, {"c": "fail"}),
        ({"a": SEEN, "b": SEEN, "c": MINE}, None, {"c": "ok"}),
        ({"a": SEEN}, False, {}),
        ({"a": NO, "b": NO}, False, {"a": "fail", "b": "fail"}),
        ({"a": SEEN, "b": NO}, None, {"": "ok", "b": "fail"}),
    ],
)
def test_shared_and_local_folders(
    seen: dict[str, tuple[bool, bool]], node_local: bool | None, states: dict[str, str]
) -> None:
    assert _states(folder_checks("output_dir runs/x", seen, node_local)) == states


def test_a_host_that_is_slow_inside() -> None:
    measured = {name: {"inside": 100e9, "all": 1e9, "ranks": 16, "bytes": 1 << 22} for name in "abc"}
    fine = [*rate_checks(measured)]
    assert [(check.name, check.state) for check in fine] == [("links", "ok")] * 3 + [("all-reduce", "ok")]
    assert fine[-1].values == {"bytes_per_second": 1e9, "ranks": 16, "hosts": 3}
    measured["b"]["inside"] = 5e9
    checks = [*rate_checks(measured)]
    assert [(check.host, check.state, check.found) for check in checks[:3]] == [
        ("a", "ok", "100.00 GB/s inside the host"),
        ("b", "fail", "5.00 GB/s inside the host, 100.00 GB/s inside other hosts"),
        ("c", "ok", "100.00 GB/s inside the host"),
    ]


@pytest.mark.parametrize(
    ("ended", "host", "words"),
    [
        ({"a": (1, "RendezvousTimeoutError"), "c": (1, "x\nRendezvousConnectionError: y")}, "c", "cannot reach the"),
        ({"a": (1, '{"problem": "closed", "is_cause": false}'), "c": (-9, "killed")}, "c", "exit code -9: killed"),
        ({"a": (1, '{"problem": "closed", "is_cause": false}'), "c": (1, LAST_WORDS)}, "c", "RuntimeError: no space"),
        (
            {
                "a": (1, '{"problem": "closed", "is_cause": false}'),
                "c": (
                    1,
                    'noise\n{"problem": "local rank 1 sees 1 GPUs", "is_cause": true}\n{"problem": "x", "is_cause": false}',
                ),
            },
            "c",
            "local rank 1 sees 1 GPUs",
        ),
        ({"c": (None, "")}, "c", "waited in vain"),
        ({"c": (1, '{"problem": "an all-reduce has wrong sums", "is_cause": false}')}, "c", "has wrong sums"),
    ],
)
def test_the_host_that_keeps_a_network_from_working(ended: dict[str, Any], host: str, words: str) -> None:
    (check,) = network_checks(ended, "10.0.0.1:29500")
    assert (check.name, check.host, check.state) == ("network", host, "fail")
    assert words in check.found
