"""The checks that `launch` and `doctor` share: exact states and words, without machines."""

from dataclasses import replace
from typing import Any

import pytest

from ds_finetune.cluster import host_checks
from ds_finetune.cluster.host_checks import Check, unreachable_check
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.system.info import HostInfo, gather_host_info

HOSTS = {"a": Host("a", 8, 1), "b": Host("b", 4, 2)}


@pytest.fixture(scope="module")
def here() -> HostInfo:
    return gather_host_info()


def _states(found: Any) -> dict[str, str]:
    return {check.host: check.state for check in found}


@pytest.mark.parametrize(
    ("code", "said", "name", "found"),
    [
        (255, "ssh: connect to host h port 22: No route to host", "ssh", "ssh: connect to host h port 22: No route"),
        (255, "root@h: Permission denied (publickey).", "ssh", "ssh: root@h: Permission denied (publickey)."),
        (127, "sh: 1: exec: /opt/p/bin/python: not found", "python", "exit code 127: sh: 1: exec: /opt/p/bin/python:"),
        (1, "/opt/p/bin/python: No module named ds_finetune", "python", "No module named"),
        (None, "", "ssh", "no answer in time"),
    ],
)
def test_why_a_host_is_lost_is_told_apart(code: int | None, said: str, name: str, found: str) -> None:
    check = unreachable_check(Host("h", 1, 1), code, said, Remote(python="/opt/p/bin/python"))
    assert (check.name, check.host, check.state) == (name, "h", "fail")
    assert found in check.found
    assert check.hint


def test_the_hint_for_a_host_that_ssh_does_not_reach_is_a_command_of_ssh() -> None:
    check = unreachable_check(Host("10.0.0.1", 1, 1, user="me", port=2222), 255, "", Remote(ssh_args=("-F", "cfg")))
    assert check.host == "10.0.0.1:2222"
    assert check.hint.startswith("make `ssh -F cfg -p 2222 me@10.0.0.1 true` work without a prompt")


def test_versions(here: HostInfo) -> None:
    other = replace(here, versions=here.versions | {"torch": "9.9", "NCCL": "2.99"})
    patch = replace(here, versions=here.versions | {"python": here.versions["python"] + "9"})
    driver = replace(here, versions=here.versions | {"driver": "570.1"})
    found = list(host_checks.version_checks(here, {"a": here, "b": other, "c": patch, "d": driver}))
    assert _states(found) == {"a": "ok", "b": "fail", "c": "warn", "d": "ok", "": "warn"}
    assert (
        f"torch 9.9 (here {here.versions['torch']}), NCCL 2.99 (here {here.versions['NCCL'] or 'missing'})"
        in found[1].found
    )
    assert found[-1].found == "different NVIDIA drivers: 570.1, none"
    absent = replace(here, versions=here.versions | {"deepspeed": ""})
    assert "deepspeed missing" in next(host_checks.version_checks(here, {"a": absent})).found


def test_packages_of_hosts_are_compared_with_the_tested_ranges(here: HostInfo) -> None:
    old = replace(here, packages=here.packages | {"deepspeed": "0.16.9", "onnx": "1.99"})
    given = {"a": here, "b": old, "c": replace(here, packages={})}
    found = list(host_checks.range_checks(given, {}))
    assert [(check.host, check.state) for check in found] == [("b", "fail"), ("b", "warn"), ("c", "warn")]
    assert found[0].found == "deepspeed 0.16.9 (tested: >=0.19.8,<0.20)"
    assert found[0].hint == "pip install 'deepspeed>=0.19.8,<0.20'"
    assert found[1].found.startswith("onnx 1.99 (tested: ")
    wanted = host_checks.range_checks(given, {"DS_FINETUNE_UNTESTED_VERSIONS": "1"})
    assert {check.state for check in wanted} == {"warn"}


def test_two_lines_for_one_host(here: HostInfo) -> None:
    elsewhere = replace(here, network_identity="other")

    def found(infos: dict[str, HostInfo], *addresses: str, port: int = 0) -> list[str]:
        hosts = {"a": HOSTS["a"], "b": replace(HOSTS["b"], port=port)}
        return [
            check.found
            for check in host_checks.identity_checks(hosts, infos, addresses=dict(zip("ab", addresses, strict=True)))
        ]

    assert not found({"a": here, "b": elsewhere}, "10.0.0.1", "10.0.0.2")
    assert found({}, "10.0.0.1", "10.0.0.1") == ["it has the same address as a: 10.0.0.1"]
    assert found({"a": here, "b": here}, "", "10.0.0.2") == [f"it is the same machine as a: {here.hostname}"]
    unknown = replace(here, network_identity="")
    assert not found({"a": unknown, "b": unknown}, "10.0.0.1", "10.0.0.2")
    # Two containers of one machine, each with an sshd of its own.
    assert not found({"a": here, "b": elsewhere}, "10.0.0.1", "10.0.0.1", port=2222)


def test_slots_beside_devices(here: HostInfo) -> None:
    infos = {"a": replace(here, gpus=["H100"] * 4, cores=64), "b": replace(here, gpus=["H100"] * 4, cores=2)}
    found = list(host_checks.device_checks(HOSTS, infos, device="cuda"))
    assert found[0] == Check(
        "devices", "a", "fail", "slots=8, 4 H100", "write slots=4, or find out why GPUs are missing"
    )
    assert found[1] == Check("devices", "b", "ok", "slots=4, 4 H100")
    assert _states(host_checks.device_checks(HOSTS, infos, device="cpu")) == {"a": "ok", "b": "warn"}
    chosen = {"a": Host("a", 1, 1, devices=(7,))}
    assert _states(host_checks.device_checks(chosen, {"a": infos["a"]}, device="cuda")) == {"a": "fail"}
    assert host_checks.rank_device(infos, {}) == "cuda"
    assert host_checks.rank_device(infos, {"DS_ACCELERATOR": "cpu"}) == "cpu"
    assert host_checks.rank_device({"a": replace(here, gpus=[])}, {}) == "cpu"


def test_ports(here: HostInfo) -> None:
    assert host_checks.port_check("a", here, 1).state == "ok"
    taken = host_checks.port_check("a", replace(here, port_holder="process 7, python"), 29_500)
    assert (taken.state, taken.found) == ("fail", "port 29500 is taken: process 7, python")
