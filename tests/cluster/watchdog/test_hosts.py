"""Faults of ranks, hosts and networks on a bed of hosts, where nothing above the ranks could end the others.

`python -m tests.cluster.watchdog.test_hosts --tries 10 [FAULT ...]` does each that often and prints a table.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.cluster.bed import INTERFACE, NETWORK, Bed, why_not
from tests.cluster.watchdog.faults import FAULTY
from tests.cluster.watchdog.faulty import CONTINUED
from tests.conftest import ROOT
from tests.running import tiny_task

SECONDS = 400
PAUSE_SECONDS = 100
LIMIT = "watchdog.limit=20 seconds"
STEPS = 3000


@dataclass(frozen=True)
class Fault:
    """What the rank of the second host does at a step (faulty.py), what is done to its host then, and who is named."""

    name: str
    of_rank: str
    named: str
    of_host: Callable[[Bed, list["subprocess.Popen[bytes]"]], None] = lambda bed, ranks: None
    within: float = 30.0
    rank: int = 1


def _pull_cable(bed: Bed, _: object) -> None:
    bed.cable(2, plugged=False)


def _crash(bed: Bed, ranks: list["subprocess.Popen[bytes]"]) -> None:
    bed.cable(2, plugged=False)
    ranks[1].kill()


def _pause(bed: Bed, ranks: list["subprocess.Popen[bytes]"]) -> None:
    for number, seconds in ((signal.SIGSTOP, PAUSE_SECONDS), (signal.SIGCONT, 0)):
        for process in ranks:
            process.send_signal(number)
        time.sleep(seconds)
    (bed.shared / CONTINUED).touch()


RANK_1, SILENT = r"rank 1 \(host \S+, process \d+\)", "sends no heartbeats: its process was killed or is stopped"
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("rank killed", "kill", rf"{RANK_1}: {SILENT}"),
        Fault("disk full", "fail", rf"{RANK_1} was the first to fail: OSError: \[Errno 28\] No space left"),
        Fault("rank stopped", "stop", rf"{RANK_1}:? {SILENT}", within=40.0),
        Fault("rank asleep", "sleep", rf"{RANK_1}: has entered"),
        Fault("host crashed", "mark", rf"{RANK_1}:? {SILENT}", _crash, within=45.0),
        Fault("cable pulled", "mark", rf"{RANK_1}:? {SILENT}", _pull_cable, within=45.0),
        Fault(
            "first rank killed",
            "kill",
            r"rank 0 \(host \S+, process \d+\), or the launcher that serves its store, has ended",
            rank=0,
        ),
        Fault("50% packet loss", "lose", r"no single rank: heartbeats of host \S+ came late", within=SECONDS),
        Fault("all ranks paused", "pause", "", _pause, within=SECONDS),
    )
}


LATE_LINE = r"^watchdog: heartbeats of host \S+ came late, by up to \d+\.\d s: the network loses packets$"


def _some_packets_lost(bed: Bed) -> Fault:
    """30% of the packets that rank 1 receives are lost: the run goes on, and is ended here once rank 0 has said so."""
    log = bed.shared / "30%-packet-loss" / "rank-0.log"

    def wait_for_the_line(_: Bed, ranks: list["subprocess.Popen[bytes]"]) -> None:
        until = time.monotonic() + SECONDS
        while "came late" not in log.read_text():
            assert time.monotonic() < until
            assert all(process.poll() is None for process in ranks), log.read_text()
            time.sleep(0.1)
        for process in ranks:
            process.kill()

    return Fault("30% packet loss", "lose_some", "", wait_for_the_line)


@dataclass(frozen=True)
class Seen:
    """What came of a fault: exit codes, seconds until each rank had ended, the report, and what the ranks printed."""

    codes: list[int]
    seconds: list[float]
    report: str
    printed: list[str]


def inflict(bed: Bed, fault: Fault) -> Seen:
    """Start one rank on each host, do the fault, and see how it ends."""
    folder = bed.shared / fault.name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (bed.shared / CONTINUED).unlink(missing_ok=True)
    task, logs = tiny_task(folder), [folder / f"rank-{rank}.log" for rank in (0, 1)]
    steps = 12 if fault.name == "all ranks paused" else STEPS
    given = [LIMIT, f"train.for={steps} steps", "checkpoint.every=never", "export.at_end=false"]
    program = [sys.executable, FAULTY, fault.of_rank, str(fault.rank), "4", str(task), *given]
    ranks = []
    for rank, log in enumerate(logs):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environ |= {
            "MASTER_ADDR": f"{NETWORK}.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            CONTINUED: str(bed.shared / CONTINUED),
        }
        with log.open("w") as out:
            ranks.append(subprocess.Popen(bed.command(rank + 1, program), env=environ, stdout=out, stderr=out))
    try:
        until = time.monotonic() + SECONDS
        while "FAULT" not in logs[fault.rank].read_text():
            assert time.monotonic() < until, [log.read_text() for log in logs]
            assert all(process.poll() is None for process in ranks), [log.read_text() for log in logs]
            time.sleep(0.05)
        began = time.monotonic()
        fault.of_host(bed, ranks)
        seconds = list(_seconds_until_ended(ranks, began, own_end=fault.of_rank != "stop"))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        bed.cable(2, plugged=True)
    report = folder / "run" / "watchdog" / "report.txt"
    text = report.read_text() if report.exists() else ""
    return Seen([process.returncode for process in ranks], seconds, text, [log.read_text() for log in logs])


def _seconds_until_ended(ranks: list["subprocess.Popen[bytes]"], began: float, *, own_end: bool) -> Iterator[float]:
    """A rank that is stopped alone on its host ends once it runs again."""
    for rank, process in enumerate(ranks):
        if rank and not own_end:
            process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        yield time.monotonic() - began


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if reason := why_not():
        pytest.skip(reason)
    with Bed(tmp_path_factory.mktemp("bed") / "bed", 2) as made:
        yield made


def wrong(fault: Fault, seen: Seen) -> list[str]:
    """Each expectation of the fault that does not hold."""
    slow = [f"ended after {max(seen.seconds):.0f} s"] if max(seen.seconds) >= fault.within else []
    if not fault.named:
        resumed = re.search(r"watchdog: rank 0 was paused for \d+ s and runs again", seen.printed[0])
        return [*slow, *([] if (seen.codes, seen.report) == ([0, 0], "") and resumed else ["the run did not resume"])]
    named = [] if re.match(fault.named, seen.report) else [f"report without {fault.named}"]
    return [*slow, *(["a rank ended with code 0"] if 0 in seen.codes else []), *named]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_run_ends_on_both_hosts_and_the_culprit_is_named(name: str, bed: Bed) -> None:
    seen = inflict(bed, FAULTS[name])
    assert not wrong(FAULTS[name], seen), (seen.report, seen.printed)


@pytest.mark.slow
def test_lost_packets_are_said_while_the_run_goes_on(bed: Bed) -> None:
    seen = inflict(bed, _some_packets_lost(bed))
    assert re.search(LATE_LINE, seen.printed[0], re.MULTILINE)
    assert seen.report == ""


def main() -> None:
    """Do each fault `--tries` times and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    chosen = parser.parse_args()
    results: dict[str, list[tuple[bool, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Bed(Path(folder) / "bed", 2) as bed:
        for name, _ in product(chosen.faults, range(chosen.tries)):
            seen = inflict(bed, FAULTS[name])
            faults = wrong(FAULTS[name], seen)
            results.setdefault(name, []).append((not faults, max(seen.seconds)))
            seconds = ", ".join(f"{each:.1f}" for each in seen.seconds)
            verdict = "; ".join((*faults, *seen.printed)) if faults else "as expected"
            report = seen.report.partition("\n")[0]
            sys.stdout.write(f"{name:18} codes {seen.codes} after {seconds} s: {report}  {verdict}\n")
            sys.stdout.flush()
    for name, tries in results.items():
        right, longest = sum(is_right for is_right, _ in tries), max(seconds for _, seconds in tries)
        sys.stdout.write(f"{name:18} {right} of {len(tries)} as expected, ended after at most {longest:.1f} s\n")
    sys.exit(not all(is_right for tries in results.values() for is_right, _ in tries))


if __name__ == "__main__":
    main()
