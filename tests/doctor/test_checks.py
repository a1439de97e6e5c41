"""From facts to findings: exact states and words, without machines."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from ds_finetune.doctor import checks
from ds_finetune.doctor.checks import Check, ClockOffset, why_lost
from ds_finetune.doctor.facts import Facts, Folder, Gpu, HostQuery, gather
from ds_finetune.doctor.links import network_checks, slow_checks
from ds_finetune.doctor.network import rounds
from ds_finetune.hostfile import Host

GPU = Gpu("H100", "GPU-1", 80 << 30, 0)
HOSTS = {"a": Host("a", 8, 1), "b": Host("b", 4, 2)}


@pytest.fixture(scope="module")
def here() -> Facts:
    return gather(HostQuery(first="localhost"))


def _states(found: Any) -> dict[str, str]:
    return {check.host: check.state for check in found}


@pytest.mark.parametrize(
    ("code", "said", "name", "found"),
    [
        (255, "ssh: connect to host h port 22: Connection timed out", "ssh", "it does not answer"),
        (255, "ssh: connect to host h port 22: No route to host", "ssh", "it does not answer"),
        (255, "Timeout, server h not responding.", "ssh", "it does not answer"),
        (255, "ssh: connect to host h port 22: Connection refused", "ssh", "nothing listens"),
        (255, "ssh: Could not resolve hostname h: Name or service not known", "ssh", "leads to no address"),
        (255, "root@h: Permission denied (publickey).", "ssh", "does not take our key"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh",
            "another than before",
        ),
        (255, "No ED25519 host key is known for h\nHost key verification failed.", "ssh", "not known here"),
        (127, "sh: 1: exec: /opt/p/bin/python: not found", "python", "no Python at /opt/p/bin/python"),
        (2, "sh: 1: cd: can't cd to /home/me/run", "python", "working folder is not there"),
        (1, "/opt/p/bin/python: No module named ds_finetune", "python", "No module named"),
        (None, "", "ssh", "no answer in time"),
    ],
)
def test_why_a_host_is_lost_is_told_apart(code: int | None, said: str, name: str, found: str) -> None:
    check = why_lost("h", code, said, "/opt/p/bin/python")
    assert (check.name, check.host, check.state) == (name, "h", "fail")
    assert found in check.found
    assert check.hint


def test_versions(here: Facts) -> None:
    other = replace(here, versions=here.versions | {"torch": "9.9", "NCCL": "2.99"})
    patch = replace(here, versions=here.versions | {"python": here.versions["python"] + "9"})
    driver = replace(here, versions=here.versions | {"driver": "570.1"})
    found = list(checks.version_checks(here, {"a": here, "b": other, "c": patch, "d": driver}))
    assert _states(found) == {"a": "ok", "b": "fail", "c": "warn", "d": "ok", "": "warn"}
    assert f"torch 9.9 (here {here.versions['torch']}), NCCL 2.99 (here not there)" in found[1].found
    assert found[-1].found == "NVIDIA drivers 570.1, none"
    absent = replace(here, versions=here.versions | {"deepspeed": ""})
    assert "deepspeed not there" in next(checks.version_checks(here, {"a": absent})).found


def test_two_lines_for_one_host(here: Facts) -> None:
    elsewhere = replace(here, machine="other", gpus=[GPU])
    container = replace(here, machine="third", gpus=[GPU])
    assert not list(checks.identity_checks({"a": "10.0.0.1", "b": "10.0.0.2"}, {"a": here, "b": elsewhere}))
    assert (
        next(checks.identity_checks({"a": "10.0.0.1", "b": "10.0.0.1"}, {})).found == "the same address as a: 10.0.0.1"
    )
    assert next(checks.identity_checks({"a": "", "b": "10.0.0.2"}, {"a": here, "b": here})).found.startswith(
        "the same machine as a"
    )
    assert (
        next(checks.identity_checks({"a": "", "b": ""}, {"a": elsewhere, "b": container})).found == "the same GPUs as a"
    )


def test_slots_beside_devices(here: Facts) -> None:
    facts = {"a": replace(here, gpus=[GPU] * 4, cores=64), "b": replace(here, gpus=[GPU] * 4, cores=2)}
    found = list(checks.device_checks(HOSTS, facts, "cuda"))
    assert found[0] == Check("devices", "a", "fail", "slots=8, 4 H100", "write slots=4, or find the missing GPUs")
    assert found[1] == Check("devices", "b", "ok", "slots=4, 4 H100")
    assert _states(checks.device_checks(HOSTS, facts, "cpu")) == {"a": "ok", "b": "warn"}
    chosen = {"a": Host("a", 1, 1, devices=(7,))}
    assert _states(checks.device_checks(chosen, {"a": facts["a"]}, "cuda")) == {"a": "fail"}
    busy = {"b": replace(facts["b"], gpus=[GPU, replace(GPU, used_bytes=9 << 30), GPU, GPU])}
    assert "GPU 1 has more than 1 GiB in use" in next(checks.device_checks(HOSTS, busy, "cuda")).found


def test_limits(here: Facts) -> None:
    good = replace(here, open_files=65_536, locked_bytes=65_536, shm_bytes=8 << 30, has_infiniband=False)
    poor = replace(good, open_files=1024, shm_bytes=64 << 20)
    found = list(
        checks.limit_checks(
            {"a": good, "b": poor, "c": replace(good, has_infiniband=True)}, world_size=16, locks_memory=False
        )
    )
    assert _states(found) == {"a": "ok", "b": "warn", "c": "warn"}
    assert found[1].found == "open files 1024; /dev/shm 64 MiB"
    assert found[1].hint.startswith("raise nofile to 1152")
    assert found[2].found == "locked memory 64 KiB"
    assert _states(checks.limit_checks({"a": good}, world_size=16, locks_memory=True)) == {"a": "warn"}
    unlimited = replace(good, open_files=-1, locked_bytes=-1)
    assert _states(checks.limit_checks({"a": unlimited}, world_size=16, locks_memory=True)) == {"a": "ok"}


def test_clocks_are_blamed_for_no_more_than_the_round_trip_leaves() -> None:
    clocks = {
        "a": ClockOffset(-0.001, 0.01),
        "b": ClockOffset(1.4, 0.01),
        "c": ClockOffset(1.4, 2.0),
        "d": ClockOffset(-3600, 0.2),
    }
    found = list(checks.clock_checks(clocks))
    assert _states(found) == {"a": "ok", "b": "warn", "c": "ok", "d": "fail"}
    assert found[0].found == "+0.00 s"
    assert found[3].found == "-3600.00 s, to 100 ms"


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib,bond", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo,down", "fail"),
    ],
)
def test_interfaces_that_variables_name(here: Facts, variable: str, value: str, state: str) -> None:
    facts = replace(here, interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "down0": []})
    assert [check.state for check in checks.interface_checks({"a": facts}, {variable: value})] == [state]


def test_the_first_host_is_found_by_name(here: Facts) -> None:
    first = replace(here, interfaces={"e0": ["10.0.0.1"], "lo": ["127.0.0.1"]}, first=["127.0.1.1"])
    there = {
        name: replace(here, first=addresses)
        for name, addresses in {"b": ["10.0.0.1"], "c": [], "d": ["127.0.0.1"], "e": ["10.0.0.9"]}.items()
    }
    found = list(checks.name_checks("a", {"a": first, **there}))
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
    assert _states(checks.folder_checks("output_dir", "runs/x", seen, node_local=node_local)) == states


def test_files_that_are_absent_or_others(here: Facts) -> None:
    mine = replace(here, files={"model": "1", "train.jsonl": "2"})
    found = list(checks.file_checks(mine, {"a": mine, "b": replace(mine, files={"model": None, "train.jsonl": "3"})}))
    assert [check.found for check in found] == [
        "model is not there",
        "train.jsonl is another than here (names or sizes)",
    ]


def test_disk_and_memory_beside_the_plan(here: Facts) -> None:
    facts = replace(
        here, memory_bytes=100, gpus=[replace(GPU, total_bytes=1000)], folders={"o": Folder("/", True, 50, 60)}
    )
    assert _states(checks.disk_checks({"a": facts, "b": facts}, "o", {"a": 110, "b": 111})) == {"a": "ok", "b": "fail"}
    locked = replace(facts, folders={"o": Folder("/", False, 50, 60)})
    assert "cannot be written in /" in next(checks.disk_checks({"a": locked}, "o", {})).found
    found = list(checks.memory_checks(HOSTS, {"a": facts, "b": facts}, rank_bytes=20, gpu_bytes=900))
    assert [(check.host, check.state) for check in found] == [("a", "fail"), ("a", "warn"), ("b", "ok"), ("b", "warn")]


def test_ports() -> None:
    facts = gather(HostQuery())
    assert next(checks.port_checks("a", facts, 1)).state == "ok"
    taken = next(checks.port_checks("a", replace(facts, port_holder="process 7, python"), 29500))
    assert (taken.state, taken.found) == ("fail", "29500 is taken: process 7, python")


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


def _heard(**values: Any) -> dict[str, Any]:
    return {
        "value": {
            "links": {},
            "all_reduce": 1e9,
            "all_gather": 1e9,
            "num_bytes": 1 << 20,
            "missing": [],
            "wrong": [],
            "problem": "",
        }
        | values
    }


def test_who_keeps_a_network_from_working() -> None:
    seats = ["a", "b", "c"]
    fine = network_checks(seats, [_heard(links={"1": 1e9}), _heard(), _heard()])
    assert [(check.name, check.state) for check in fine] == [
        ("links", "ok"),
        ("all-reduce", "ok"),
        ("all-gather", "ok"),
    ]
    for answers, host, words in (
        ([_heard(missing=[2]), _heard(missing=[2]), _heard(problem="cannot reach")], "c", "cannot reach"),
        ([_heard(missing=[2]), _heard(missing=[2]), {"lost": None, "said": ""}], "c", "did not answer in time"),
        (
            [_heard(problem="closed by peer"), _heard(problem="closed"), {"lost": -9, "said": "x\nkilled"}],
            "c",
            "ended with exit code -9: killed",
        ),
        ([_heard(wrong=[1]), _heard(), _heard(wrong=[1])], "b", "sent other values"),
        ([_heard(), _heard(problem="no way to c"), _heard()], "b", "no way to c"),
    ):
        odd = network_checks(seats, answers)
        assert [(check.host, check.state) for check in odd] == [(host, "fail")]
        assert words in odd[0].found
