"""Which hosts a launch refuses, from the facts that they report, in the same words as the doctor."""

from dataclasses import replace
from typing import Any

import pytest

from ds_finetune.cluster.host_checks import (
    Check,
    describe,
    failed_checks,
    host_checks,
    label,
    meeting_address,
    unreachable_check,
)
from ds_finetune.cluster.launch.commands import Job
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.cluster.launch.run import LaunchRequest, check_hosts, largest_fit
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import LaunchError
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.info import HostInfo
from ds_finetune.system.versions import installed_versions

A, B, C = Host("a", 4, 1), Host("b", 4, 2), Host("c", 2, 3)


HERE = HostInfo(
    hostname="here",
    network_identity="here",
    versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
    packages=installed_versions(),
    gpus=[],
    cores=8,
    interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    ssh_client="",
    ssh_server_address="",
    port=1,
    port_holder=None,
)


def _info(machine: str, **other: Any) -> HostInfo:
    return replace(HERE, **({"hostname": machine, "network_identity": machine} | other))


UNREACHABLE = unreachable_check(B, 255, "ssh: connect to host b port 22: No route to host", Remote())
CASES: list[tuple[dict[Host, Any], dict[str, str], list[tuple[Host, str]]]] = [
    ({A: _info("a"), B: _info("b")}, {}, []),
    ({A: _info("a"), B: UNREACHABLE}, {}, [(B, UNREACHABLE.found)]),
    (
        {A: _info("a"), B: _info("b"), C: _info("c", versions=HERE.versions | {"torch": "2.11.0"})},
        {},
        [(C, "torch 2.11.0 (here 2.13.0)")],
    ),
    ({A: _info("a"), B: _info("a")}, {}, [(B, "it is the same machine as a: a")]),
    ({A: _info("a", gpus=["H100"] * 4), B: _info("b", gpus=["H100"] * 3)}, {}, [(B, "slots=4, 3 H100")]),
    ({A: _info("a", gpus=["H100"] * 4), B: _info("b", gpus=["H100"] * 3)}, {"DS_ACCELERATOR": "cpu"}, []),
    (
        {Host("a", 1, 1, devices=(5,)): _info("a", gpus=["H100"] * 5)},
        {},
        [(Host("a", 1, 1, devices=(5,)), "slots=1, 5 H100, devices 5 chosen")],
    ),
]


def _faults(answers: dict[Host, Any], env: dict[str, str]) -> list[tuple[Host, Check]]:
    """The faults that a launch finds: each host has sent its facts, or a failed check says why not."""
    hosts = {label(host): host for host in answers}
    infos = {label(host): answer for host, answer in answers.items() if isinstance(answer, HostInfo)}
    lost = [answer for answer in answers.values() if isinstance(answer, Check)]
    return failed_checks(hosts, [*lost, *host_checks(hosts, infos, here=HERE, environ=env)])


@pytest.mark.parametrize(("answers", "env", "wanted"), CASES)
def test_hosts_that_are_refused(answers: dict[Host, Any], env: dict[str, str], wanted: list[tuple[Host, str]]) -> None:
    failed = [(host, check.found) for host, check in _faults(answers, env) if check.state == "fail"]
    assert failed == wanted


@pytest.mark.parametrize(("answers", "env", "wanted"), [case for case in CASES if case[2]])
def test_the_refusal_of_a_launch_is_what_the_doctor_finds(
    answers: dict[Host, Any], env: dict[str, str], wanted: list[tuple[Host, str]]
) -> None:
    """The doctor's own assembly of its checks for the same answers has the same text and hint for each fault."""
    with pytest.raises(LaunchError) as refused:
        check_hosts(_faults(answers, env), len(answers), print)
    names = {label(host): host for host in answers}
    infos = {label(host): answer for host, answer in answers.items() if isinstance(answer, HostInfo)}
    reached = [answer for answer in answers.values() if isinstance(answer, Check)]
    for check in [*reached, *host_checks(names, infos, here=HERE, environ=env)]:
        if check.state == "fail":
            assert describe(names[check.host], check) in refused.value.message
            assert check.hint
    assert refused.value.message.count("hint: ") == len(wanted)


def test_the_meeting_address_is_one_that_others_reach() -> None:
    local = Host("localhost", 2, 1)
    assert meeting_address((local,), {local: _info("a")}) == "127.0.0.1"
    assert meeting_address((local, B), {local: _info("a"), B: _info("b")}) == "10.0.0.1"
    link_local = _info("a", interfaces={"lo": ["127.0.0.1"], "eth0": ["169.254.1.1"]})
    assert meeting_address((local, B), {local: link_local, B: _info("b")}) == ""
    # The address that the ssh connections of the others came from goes before a bridge that is there by chance.
    bridge = _info("a", interfaces={"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7"]})
    assert meeting_address((local, B), {local: bridge, B: _info("b", ssh_client="10.0.0.7")}) == "10.0.0.7"
    # An address in the hostfile goes before those of the host; a name of ssh's own configuration does not resolve.
    named = Host("10.9.9.9", 2, 1)
    assert meeting_address((named, B), {named: _info("a"), B: _info("b")}) == "10.9.9.9"
    alias = Host("an-alias.invalid", 2, 1)
    assert meeting_address((alias, B), {alias: _info("a", ssh_server_address="10.5.5.5"), B: _info("b")}) == "10.5.5.5"


def _config(**sections: Any) -> RunConfig:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "deepspeed": {"zero_optimization": {"stage": 2}}}
    return RunConfig.model_validate(tree | sections)


def _request(hosts: tuple[Host, ...], **sections: Any) -> LaunchRequest:
    config = _config(**sections)
    return LaunchRequest(Job("r.yaml", (), hosts, "r-1"), RunSettings.of(config), config.launch, "o", Remote())


def test_the_most_hosts_that_the_layout_allows() -> None:
    batch = {"global_batch_size": 16, "micro_batch_size": 1}
    four = tuple(Host(name, 4, line) for line, name in enumerate("abcd", start=1))

    def largest(fit: tuple[Host, ...], **launch: int) -> tuple[Host, ...]:
        return largest_fit(_request(four, train=batch, launch=launch), fit, device="cpu")

    assert largest(four, min_hosts=1) == four
    # Sixteen rows are not to be had from twelve ranks.
    assert largest(four[1:], min_hosts=1) == four[1:3]
    assert largest(four[1:]) == ()
    assert largest(four[1:], min_hosts=3) == ()
