"""From facts to findings: exact states and words, without machines."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finetune.cluster.doctor.checks import (
    ClockOffset,
    clock_checks,
    disk_checks,
    file_checks,
    folder_checks,
    gpu_checks,
    infiniband_checks,
    limit_checks,
    memory_checks,
    name_checks,
    network_checks,
    slow_checks,
    triton_checks,
)
from ds_finetune.cluster.doctor.messages import (
    ChildLost,
    FolderInfo,
    HostDetails,
    HostQuery,
    NetworkResult,
    RequestRefused,
)
from ds_finetune.cluster.doctor.network import _best_rate, rounds
from ds_finetune.cluster.doctor.probe import gather_details
from ds_finetune.config.hostfile import Host
from ds_finetune.system import info
from ds_finetune.system.info import Gpu, query_gpus

GPU = Gpu("H100", "GPU-1", 80 << 30, 0)
HOSTS = {"a": Host("a", 8, 1), "b": Host("b", 4, 2)}


@pytest.fixture(scope="module")
def here() -> HostDetails:
    return gather_details(HostQuery(first_host="localhost"))


def _states(found: Any) -> dict[str, str]:
    return {check.host: check.state for check in found}


def test_limits(here: HostDetails) -> None:
    good = replace(here, open_files=65_536, locked_bytes=65_536, shm_bytes=8 << 30, has_infiniband=False)
    poor = replace(good, open_files=1024, shm_bytes=64 << 20)
    found = list(
        limit_checks({"a": good, "b": poor, "c": replace(good, has_infiniband=True)}, world_size=16, locks_memory=False)
    )
    assert _states(found) == {"a": "ok", "b": "warn", "c": "warn"}
    assert found[1].found == "open files 1024; /dev/shm 64 MiB"
    assert found[1].hint.startswith("raise nofile to 1152")
    assert found[2].found == "locked memory 64 KiB"
    assert _states(limit_checks({"a": good}, world_size=16, locks_memory=True)) == {"a": "warn"}
    unlimited = replace(good, open_files=-1, locked_bytes=-1)
    assert _states(limit_checks({"a": unlimited}, world_size=16, locks_memory=True)) == {"a": "ok"}


def test_gpus_beside_what_nvidia_smi_lists(here: HostDetails) -> None:
    good = replace(here, gpus=["H100"], gpu_memory=[GPU])
    busy = replace(good, network_identity="m", gpu_memory=[replace(GPU, uuid="GPU-2", used_bytes=9 << 30)])
    silent = replace(good, network_identity="n", gpu_memory=[])
    shared = replace(good, network_identity="o")
    exclusive = replace(GPU, uuid="GPU-3", compute_mode="Exclusive_Process")
    single = replace(good, network_identity="p", gpu_memory=[exclusive])
    found = list(gpu_checks({"a": good, "b": busy, "c": silent, "d": shared, "e": single}))
    assert [(check.host, check.state, check.found) for check in found] == [
        ("b", "warn", "GPU 0 has more than 1 GiB in use"),
        ("c", "fail", "nvidia-smi lists 0 of 1 GPUs"),
        ("e", "warn", "GPU 0 admits one process"),
        ("d", "fail", "the same GPUs as a"),
    ]


def test_memory_that_nvidia_smi_does_not_tell(here: HostDetails, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of GPUs that share the host's memory, and of those in MIG mode."""
    rows = "NVIDIA GB10, GPU-1, [N/A], [N/A], Default\n"
    rows += "NVIDIA H100, GPU-2, 81559, [Insufficient Permissions], Default\n"
    monkeypatch.setattr(info.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(info.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=rows, returncode=0))
    gpus = query_gpus()
    assert [(gpu.total_bytes, gpu.used_bytes) for gpu in gpus] == [(None, None), (81559 << 20, None)]
    known = replace(here, gpus=["H100"], gpu_memory=gpus)
    assert not list(gpu_checks({"a": known}))
    checks = list(memory_checks(HOSTS, {"a": known}, rank_bytes=0, gpu_bytes=90 << 30))
    assert [(check.state, check.found[:3]) for check in checks] == [("ok", "hos"), ("fail", "GPU")]
    shared = replace(known, gpu_memory=gpus[:1])
    assert len(list(memory_checks(HOSTS, {"a": shared}, rank_bytes=0, gpu_bytes=90 << 30))) == 1


def test_infiniband_that_nccl_cannot_use(here: HostDetails) -> None:
    hosts = {
        f"{has_devices} {has_library}": replace(here, has_infiniband=has_devices, has_ibverbs=has_library)
        for has_devices in (False, True)
        for has_library in (False, True)
    }
    assert _states(infiniband_checks(hosts)) == {"True False": "warn"}


def test_clocks_are_blamed_for_no_more_than_the_round_trip_leaves() -> None:
    clocks = {
        "a": ClockOffset(-0.001, 0.01),
        "b": ClockOffset(1.4, 0.01),
        "c": ClockOffset(1.4, 2.0),
        "d": ClockOffset(-3600, 0.2),
    }
    found = list(clock_checks(clocks))
    assert _states(found) == {"a": "ok", "b": "warn", "c": "ok", "d": "fail"}
    assert found[0].found == "+0.00 s"
    assert found[3].found == "-3600.00 s +- 100 ms"


def test_the_first_host_is_found_by_name(here: HostDetails) -> None:
    first = replace(here, interfaces={"e0": ["10.0.0.1"], "lo": ["127.0.0.1"]}, first_host_addresses=["127.0.1.1"])
    there = {
        name: replace(here, first_host_addresses=addresses)
        for name, addresses in {"b": ["10.0.0.1"], "c": [], "d": ["127.0.0.1"], "e": ["10.0.0.9"]}.items()
    }
    found = list(name_checks("a", {"a": first, **there}))
    assert _states(found) == {"a": "warn", "b": "ok", "c": "warn", "d": "fail", "e": "fail"}


@pytest.mark.parametrize(
    ("seen", "node_local", "states"),
    [
        ({"a": ["a", "b"], "b": ["a", "b"]}, False, {"": "ok"}),
        ({"a": ["a", "b"], "b": ["a", "b"]}, True, {"": "warn"}),
        ({"a": ["a"], "b": ["b"]}, False, {"": "fail"}),
        ({"a": ["a"], "b": ["b"]}, True, {"": "ok"}),
        ({"a": ["a"], "b": ["b"]}, None, {"": "ok"}),
        ({"a": ["a", "b"], "b": ["a", "b"], "c": ["c"]}, False, {"c": "fail"}),
        ({"a": ["a"]}, False, {}),
        ({"a": ["a", "b"], "b": ["a", "b"], "c": ["a", "b"]}, False, {"": "ok", "c": "fail"}),
        ({"a": [], "b": []}, False, {"a": "fail", "b": "fail"}),
    ],
)
def test_shared_and_local_folders(seen: dict[str, list[str]], node_local: bool | None, states: dict[str, str]) -> None:
    assert _states(folder_checks("output_dir", "runs/x", seen, node_local=node_local)) == states


def test_files_that_are_absent_or_others(here: HostDetails) -> None:
    mine = replace(here, files={"model": "1", "train.jsonl": "2"})
    found = list(file_checks(mine, {"a": mine, "b": replace(mine, files={"model": None, "train.jsonl": "3"})}))
    assert [check.found for check in found] == [
        "model does not exist there",
        "train.jsonl differs from the one here (names or sizes)",
    ]


def test_disk_and_memory_beside_the_plan(here: HostDetails) -> None:
    facts = replace(
        here,
        memory_bytes=100,
        gpu_memory=[replace(GPU, total_bytes=1000)],
        folders={"o": FolderInfo("/", True, 50, 60)},
    )
    assert _states(disk_checks({"a": facts, "b": facts}, "o", {"a": 110, "b": 111})) == {"a": "ok", "b": "fail"}
    locked = replace(facts, folders={"o": FolderInfo("/", False, 50, 60)})
    assert "cannot be written in /" in next(disk_checks({"a": locked}, "o", {})).found
    found = list(memory_checks(HOSTS, {"a": facts, "b": facts}, rank_bytes=20, gpu_bytes=900))
    assert [(check.host, check.state) for check in found] == [("a", "fail"), ("a", "warn"), ("b", "ok"), ("b", "warn")]


@pytest.mark.parametrize("count", range(2, 9))
def test_every_pair_meets_once_and_nobody_twice_at_a_time(count: int) -> None:
    found = rounds(count)
    assert sorted(pair for together in found for pair in together) == list(combinations(range(count), 2))
    assert all(len({place for pair in together for place in pair}) == 2 * len(together) for together in found)
    assert len(found) == count - 1 + count % 2


@pytest.mark.parametrize("count", [9, 10, 64])
def test_many_hosts_are_a_ring(count: int) -> None:
    found = rounds(count)
    assert sorted(pair for together in found for pair in together) == [(n, (n + 1) % count) for n in range(count)]
    assert all(len({place for pair in together for place in pair}) == 2 * len(together) for together in found)


def _links(slow: dict[tuple[str, str], float], hosts: str = "abcd") -> dict[tuple[str, str], float]:
    return {(x, y): slow.get((x, y), 1e9) for x in hosts for y in hosts if x != y}


def test_a_slow_host_is_told_from_a_slow_link() -> None:
    assert not list(slow_checks(_links({})))
    sends = list(slow_checks(_links({("c", other): 2e8 for other in "abd"})))
    assert [(check.host, check.state) for check in sends] == [("c", "warn")]
    assert "sends 0.20 GB/s at most, other hosts 1.00 GB/s" in sends[0].found
    both = list(slow_checks(_links({pair: 1e6 for other in "abd" for pair in (("c", other), (other, "c"))})))
    assert [check.found.split()[0] for check in both] == ["sends", "receives"]
    assert {(check.host, check.state) for check in both} == {("c", "fail")}
    link = list(slow_checks(_links({("a", "b"): 1e6})))
    assert [(check.host, check.found) for check in link] == [("a", "1.0 MB/s to b, other links 1.00 GB/s")]
    assert [check.host for check in slow_checks(_links({("b", "a"): 1e7}, "ab"))] == ["b"]


def _measured(**values: Any) -> NetworkResult:
    usual = {"links": {}, "all_reduce": 1e9, "all_gather": 1e9, "num_bytes": 1 << 20}
    return NetworkResult(**(usual | values))


def test_the_host_that_keeps_a_network_from_working() -> None:
    hosts = ["a", "b", "c"]
    fine = network_checks(hosts, [_measured(links={"1": 1e9}), _measured(), _measured()])
    assert [(check.name, check.state) for check in fine] == [
        ("links", "ok"),
        ("all-reduce", "ok"),
        ("all-gather", "ok"),
    ]
    for replies, host, words in (
        ([_measured(missing=(2,)), _measured(missing=(2,)), _measured(problem="cannot reach")], "c", "cannot reach"),
        ([_measured(missing=(2,)), _measured(missing=(2,)), ChildLost(None, "")], "c", "did not answer in time"),
        (
            [_measured(problem="closed by peer"), _measured(problem="closed"), ChildLost(-9, "x\nkilled")],
            "c",
            "ended with exit code -9: killed",
        ),
        ([_measured(wrong=(1,)), _measured(), _measured(wrong=(1,))], "b", "sent wrong values"),
        ([_measured(), _measured(problem="no way to c"), _measured()], "b", "no way to c"),
        ([_measured(), _measured(), RequestRefused("no GPU", "")], "c", "no GPU"),
    ):
        checks = network_checks(hosts, replies)
        assert [(check.host, check.state) for check in checks] == [(host, "fail")]
        assert words in checks[0].found


def test_opening_a_connection_is_not_measured() -> None:
    sizes: list[int] = []

    def exchange(size: int) -> float:
        sizes.append(size)
        return 2.0 if len(sizes) == 1 else size / 1e9

    assert _best_rate(exchange, SimpleNamespace(type="cuda")) == (pytest.approx(1e9), 1 << 28)


def test_hosts_where_triton_cannot_compile(here: HostDetails) -> None:
    poor = replace(here, triton_problem=["there is no C compiler (gcc or clang)", "install gcc (Debian)"])
    (found,) = triton_checks({"a": replace(here, triton_problem=["", ""]), "b": poor})
    assert (found.host, found.state, found.hint) == ("b", "warn", "install gcc (Debian)")
    assert "there is no C compiler (gcc or clang); auto takes torch's" in found.found
