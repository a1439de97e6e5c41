"""The test bed itself: hosts reach each other, have folders of their own, and crash without a word."""

import subprocess

import pytest

from tests.cluster.bed import Bed


def _ssh(bed: Bed, number: int, command: str) -> subprocess.CompletedProcess[str]:
    address = bed.hosts[number - 1].address
    return bed.run(1, ["ssh", "-F", str(bed.ssh_config), "-o", "ConnectTimeout=3", address, command], timeout=120)


def test_hosts_reach_each_other_and_have_their_own_folders(bed: Bed) -> None:
    for number in (1, 2, 3):
        assert _ssh(bed, number, f"echo {number} > {bed.own}/who; hostname -I").stdout.split()[0] == f"10.77.0.{number}"
    assert [_ssh(bed, number, f"cat {bed.own}/who").stdout.strip() for number in (1, 2, 3)] == ["1", "2", "3"]
    (bed.shared / "note").write_text("the same")
    assert _ssh(bed, 3, f"cat {bed.shared}/note").stdout == "the same"


def test_a_cable_is_pulled_and_a_host_crashes_and_comes_back(bed: Bed) -> None:
    bed.cable(2, plugged=False)
    assert _ssh(bed, 2, "true").returncode == 255
    bed.cable(2, plugged=True)
    assert _ssh(bed, 2, "true").returncode == 0
    left = subprocess.Popen(bed.command(2, ["sleep", "100"]))
    bed.crash(2)
    assert left.wait(120) == -9
    assert _ssh(bed, 2, "true").returncode == 255
    bed.repair(2)
    assert _ssh(bed, 2, "true").returncode == 0


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_outside_is_reached(bed: Bed, number: int) -> None:
    """A namespace of its own has no way to the machine's other addresses."""
    assert bed.run(number, ["ip", "route", "get", "192.0.2.1"], timeout=120).returncode != 0
