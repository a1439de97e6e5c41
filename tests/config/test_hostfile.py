"""What a hostfile says, and which of its hosts are chosen."""

from pathlib import Path

import pytest

from ds_finetune.config.hostfile import Host, read_hostfile, select_hosts
from ds_finetune.errors import LaunchError
from tests.conftest import ROOT

HOSTS = (Host("a", 4, 1), Host("b", 2, 2), Host("fe80::1", 1, 3))


def test_hostfiles_of_the_project_are_read() -> None:
    found = {path.name: read_hostfile(path) for path in sorted((ROOT / "hostfiles").iterdir())}
    assert {name: sum(host.slots for host in hosts) for name, hosts in found.items()} == {
        "nodes64": 512,
        "one_node": 8,
        "two_nodes": 16,
        "unequal": 12,
    }


def test_hostfile_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "\ufeff# two\n\nme@10.0.0.1 slots=2 # first\nfe80::1   slots = 4\nme@[::1]:2222 slots=1\nnode-7:22\tslots=8\r\nnode-7:23 slots=1\n"
    )
    assert read_hostfile(path) == (
        Host("10.0.0.1", 2, 3, user="me"),
        Host("fe80::1", 4, 4),
        Host("::1", 1, 5, user="me", port=2222),
        Host("node-7", 8, 6, port=22),
        Host("node-7", 1, 7, port=23),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\na slots=1\n", "line 2: host `a` is already in line 1"),
        ("a slots=0\n", "line 1 column 3: host `a` has slots=0"),
        ("a\n", "line 1 column 2: host `a` is followed by ``, which is not `slots=N`"),
        ("a 8\n", "line 1 column 3: host `a` is followed by `8`, which is not `slots=N`"),
        ("slots=4\n", "column 1: expected a host, not `slots=4`"),
        ("# none\n", "has 1 lines and names no host"),
        ("a slots=8 extra\n", "line 1 column 3: host `a` is followed by `slots=8 extra`, which is not `slots=N`"),
        ("a slots=-1\n", "line 1 column 3: host `a` is followed by `slots=-1`"),
        ("\n  a:99999 slots=1\n", "line 2 column 3: port `99999` of host `a` is not from 1 to 65535"),
        ("a:ssh slots=1\n", "line 1 column 1: port `ssh`"),
        ("@a slots=1\n", "line 1 column 1: `@a` is not a host"),
        ("-oProxyCommand=x slots=1\n", "expected a host, not `-oProxyCommand=x`"),
        ("-v slots=1\n", "`-v` is not a host"),
        ("me@a slots=1\nyou@a slots=2\n", "line 2: host `a` is already in line 1"),
    ],
)
def test_bad_hostfiles(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert message in caught.value.message


def test_a_named_hostfile_that_is_missing_is_never_a_local_run(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert "does not exist" in caught.value.message
    assert "never started locally" in caught.value.hint


def test_a_hostfile_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read: Is a directory"):
        read_hostfile(tmp_path)


def test_a_binary_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(bytes([255, 254, 0, 1]))
    with pytest.raises(LaunchError, match="is not UTF-8"):
        read_hostfile(path)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("b", "", (HOSTS[1],)),
        ("b@a:0,2", "", (Host("a", 2, 1, devices=(0, 2)), HOSTS[1])),
        ("a:0,1,2,3", "", (HOSTS[0],)),
        ("fe80::1", "", (HOSTS[2],)),
        ("[fe80::1]:0", "", (HOSTS[2],)),
        ("", "a", HOSTS[1:]),
        ("", "a:3@fe80::1", (Host("a", 3, 1, devices=(0, 1, 2)), HOSTS[1])),
    ],
)
def test_chosen_hosts(include: str, exclude: str, left: tuple[Host, ...]) -> None:
    assert select_hosts(HOSTS, include=include, exclude=exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "are both given"),
        ("c", "", "names host `c`, which is not among the 3"),
        ("a:4", "", "names device 4 of host `a`, which has slots=4"),
        ("", "a:x", "`x` after host `a` is not a list of device numbers"),
        ("", "a@b@fe80::1", "leaves none of 7 devices"),
    ],
)
def test_choices_that_cannot_be(include: str, exclude: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        select_hosts(HOSTS, include=include, exclude=exclude)
    assert message in caught.value.message


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_name_of_two_lines_chooses_neither(option: str) -> None:
    """Two containers on one machine differ by port, which `--include` and `--exclude` cannot name."""
    hosts = (Host("a", 4, 1, port=22), Host("a", 2, 3, port=2222), Host("b", 1, 4))
    for text in ("a", "a:0"):
        with pytest.raises(
            LaunchError, match=f"--{option} names host `a`, but lines 1 and 3 of the hostfile both have"
        ):
            select_hosts(hosts, **{option: text})
    assert select_hosts(hosts, include="b") == hosts[2:]
