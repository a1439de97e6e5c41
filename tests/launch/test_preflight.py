"""What keeps hosts from running together, from what they say of themselves."""

import socket
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.hostfile import Host, read_hostfile
from ds_finetune.launch.host_info import facts, free_port, interface_towards
from ds_finetune.launch.node_launchers import NODE_LAUNCHERS, Rendezvous
from ds_finetune.launch.preflight import meeting_place, problems_of, uses_gpus
from ds_finetune.launch.run import largest_fit
from tests.conftest import ROOT

A, B, C = Host("a", 4, 1), Host("b", 4, 2), Host("c", 2, 3)


def _said(machine: str, **other: Any) -> dict[str, Any]:
    usual = {
        "hostname": machine,
        "machine": machine,
        "devices": 0,
        "port": 1,
        "reached_at": [],
        "asked_from": [],
        "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    }
    return usual | {"versions": {"torch": "2.13.0", "deepspeed": "0.19.8"}} | other


@pytest.mark.parametrize(
    ("greetings", "env", "wanted"),
    [
        ({A: _said("a"), B: _said("b")}, {}, []),
        ({A: _said("a"), B: "cannot be reached by ssh: no route"}, {}, [(B, "cannot be reached by ssh: no route")]),
        (
            {A: _said("a"), B: _said("b"), C: _said("c", versions={"torch": "2.11.0", "deepspeed": "0.19.8"})},
            {},
            [(C, "torch is 2.11.0, on a it is 2.13.0")],
        ),
        ({A: _said("a"), B: _said("a")}, {}, [(B, "is the machine that line 1 names `a` (a)")]),
        ({A: _said("a", devices=4), B: _said("b", devices=3)}, {}, [(B, "has 3 GPUs, the hostfile wants 4")]),
        ({A: _said("a", devices=4), B: _said("b", devices=3)}, {"DS_ACCELERATOR": "cpu"}, []),
        (
            {Host("a", 1, 1, devices=(5,)): _said("a", devices=5)},
            {},
            [(Host("a", 1, 1, devices=(5,)), "has 5 GPUs, the hostfile wants 6")],
        ),
        (
            {A: _said("a"), B: _said("b", interfaces={"ib0": ["10.0.0.2"]})},
            {"GLOO_SOCKET_IFNAME": "eth0"},
            [(B, "GLOO_SOCKET_IFNAME is eth0; its interfaces are ib0")],
        ),
        ({A: _said("a")}, {"NCCL_SOCKET_IFNAME": "^docker0"}, []),
        ({A: _said("a")}, {"NCCL_SOCKET_IFNAME": "eth"}, []),
    ],
)
def test_problems(greetings: dict[Host, Any], env: dict[str, str], wanted: list[tuple[Host, str]]) -> None:
    assert [(problem.host, problem.text) for problem in problems_of(greetings, env)] == wanted


def test_the_meeting_place_is_one_that_others_reach() -> None:
    assert meeting_place((Host("localhost", 2, 1),), {Host("localhost", 2, 1): _said("a")}) == "127.0.0.1"
    local = Host("localhost", 2, 1)
    assert meeting_place((local, B), {local: _said("a"), B: _said("b")}) == "10.0.0.1"
    assert (
        meeting_place(
            (local, B), {local: _said("a", interfaces={"lo": ["127.0.0.1"], "eth0": ["169.254.1.1"]}), B: _said("b")}
        )
        == ""
    )
    # The address from which the others were asked goes before a bridge that is there by chance.
    bridge = _said("a", interfaces={"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7"]})
    assert meeting_place((local, B), {local: bridge, B: _said("b", asked_from=["10.0.0.7"])}) == "10.0.0.7"
    # An address goes before what the host says of itself; a name of ssh's own configuration leads nowhere.
    assert meeting_place((Host("10.9.9.9", 2, 1), B), {Host("10.9.9.9", 2, 1): _said("a")}) == "10.9.9.9"
    alias = Host("an-alias.invalid", 2, 1)
    assert meeting_place((alias, B), {alias: _said("a", reached_at=["10.5.5.5"])}) == "10.5.5.5"


def test_what_this_host_says_of_itself() -> None:
    said = facts()
    assert "127.0.0.1" in said["interfaces"]["lo"]
    assert said["versions"]["torch"].startswith("2.")
    assert 0 < said["port"] < 65536
    assert interface_towards("127.0.0.1") == "lo"
    assert not uses_gpus({A: said}, {"DS_ACCELERATOR": "cpu"})


def test_a_port_that_is_taken_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert free_port(taken.getsockname()[1]) == 0


def _config(**sections: Any) -> RunConfig:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "deepspeed": {"zero_optimization": {"stage": 2}}}
    return RunConfig.model_validate(tree | sections)


def test_the_most_hosts_that_the_layout_allows() -> None:
    batch = {"global_batch_size": 16, "micro_batch_size": 1}
    config = _config(train=batch, launch={"min_hosts": 1})
    four = tuple(Host(name, 4, line) for line, name in enumerate("abcd", start=1))
    assert largest_fit(config, four, four, device="cpu") == four
    # Sixteen rows are not to be had from twelve ranks.
    assert largest_fit(config, four, four[1:], device="cpu") == four[1:3]
    assert largest_fit(_config(train=batch), four, four[1:], device="cpu") == ()
    assert largest_fit(_config(train=batch, launch={"min_hosts": 3}), four, four[1:], device="cpu") == ()


@pytest.mark.parametrize("launcher", NODE_LAUNCHERS)
def test_commands_of_many_hosts(launcher: str) -> None:
    hosts = read_hostfile(ROOT / "hostfiles" / "nodes64")
    commands = [
        NODE_LAUNCHERS[launcher](Rendezvous(hosts, index, "node01", 29500), ["RUN.yaml"], "python")
        for index in range(64)
    ]
    assert len({tuple(command) for command in commands}) == 64
    assert all(command[-2:] == ["ds_finetune.worker", "RUN.yaml"] for command in commands)
    assert sum(len(word) for word in commands[0]) < 10_000
