"""mpirun and srun put ranks where the hostfile says, with the variables that travel and no others; nothing is trained
here.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ds_finetune.cluster.launch.commands import Job, mpirun_command, starting_environment
from ds_finetune.config.hostfile import Host
from ds_finetune.system.rank_files import RUN_ID
from tests.cluster.bed import Bed
from tests.cluster.slurm import Slurm, allocate, why_no_slurm
from tests.cluster.training import job_on, processes_with, started

WHO = """
import json, os, subprocess, sys
from pathlib import Path
from ds_finetune.system.world import World
world = World.from_environment(os.environ)
here = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.strip()
names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MINE", "SECRET_OF_THE_SHELL", "DS_FINETUNE_RUN_ID", "HOME")
told = [world.rank, world.world_size, world.local_rank, here, {name: os.environ.get(name) for name in names}, sys.argv[1:]]
Path(os.environ["TOLD"], str(os.getpid())).write_text(json.dumps(told))
"""
"""Each process writes what it is to a file of its own: srun mixes lines that ranks print at the same time, of 900 lines
of three ranks 45.
"""
FAIL = "import os, sys, time; from ds_finetune.system.world import World; rank = World.from_environment(os.environ).rank; rank == 2 and sys.exit(7); time.sleep(200)"
LEFT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "elsewhere", "SECRET_OF_THE_SHELL": "x"}
"""What a shell has left from another launch; ranks that took it would each be a run of their own."""

LIMIT = 120
"""Seconds in which nothing may be left of a run whose rank or host has failed."""


@dataclass
class Launcher:
    """A launcher on the bed: names of the second and the first host for it, and what it is given for a job."""

    names: tuple[str, str]
    start: Callable[[Job], tuple[list[str], dict[str, str]]]


@pytest.fixture(params=["mpirun", "slurm"], scope="module")
def launcher(request: pytest.FixtureRequest, bed: Bed) -> Iterator[Launcher]:
    if request.param == "mpirun":
        ssh = ["-F", str(bed.ssh_config)]
        yield Launcher(
            ("10.77.0.2", "10.77.0.1"),
            lambda job: (mpirun_command(job, ssh), starting_environment(job, os.environ | LEFT)),
        )
        return
    reason = why_no_slurm()
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with Slurm(bed) as slurm:
        yield Launcher(("n2", "n1"), lambda job: (allocate(slurm, job), os.environ | LEFT | slurm.environ))


def _job(bed: Bed, launcher: Launcher, code: str) -> Job:
    """Two ranks on the second host, then one on the first."""
    first, second = launcher.names
    job = job_on(bed, Path("a run.yaml"), 1, 1)
    variables = {**job.variables, "MINE": "two words; and $HOME"}
    hosts = (Host(first, 2, 1), Host(second, 1, 2))
    return replace(
        job, hosts=hosts, master_addr=first, variables=variables, entry=("-c", code), overrides=("a.b='c d'",)
    )


def test_ranks_are_where_the_hostfile_says(bed: Bed, launcher: Launcher) -> None:
    told = Path(tempfile.mkdtemp(dir=bed.shared))
    job = _job(bed, launcher, WHO)
    job = replace(job, variables={**job.variables, "TOLD": str(told)})
    run = started(bed, *launcher.start(job), bed.shared)
    printed = run.process.communicate(timeout=300)[0]
    assert run.process.returncode == 0, printed
    found = sorted(json.loads(file.read_text()) for file in told.iterdir())
    assert [values[:4] for values in found] == [
        [0, 3, 0, "10.77.0.2"],
        [1, 3, 1, "10.77.0.2"],
        [2, 3, 0, "10.77.0.1"],
    ], printed
    for *_, variables, arguments in found:
        assert variables == {
            "MASTER_ADDR": launcher.names[0],
            "GLOO_SOCKET_IFNAME": "e0",
            "MINE": "two words; and $HOME",
            "SECRET_OF_THE_SHELL": None,
            RUN_ID: "test",
            "HOME": os.environ["HOME"],
        }
        assert arguments == ["a run.yaml", "a.b='c d'"]


def test_one_rank_that_fails_ends_all_at_once(bed: Bed, launcher: Launcher) -> None:
    run = started(bed, *launcher.start(_job(bed, launcher, FAIL)), bed.shared)
    since = time.monotonic()
    printed = run.process.communicate(timeout=300)[0]
    assert run.process.returncode not in (0, None), printed
    assert time.monotonic() - since < LIMIT
    assert processes_with(bed, "sys.exit(7)") == []


@pytest.mark.slow
def test_mpirun_gives_up_a_host_whose_cable_is_pulled(bed: Bed) -> None:
    """By itself it would wait for minutes; the host gives up as well and ends what runs there."""
    job = replace(
        job_on(bed, Path("run.yaml"), 1, 1), entry=("-c", "import time; print('up', flush=True); time.sleep(100)")
    )
    environ = starting_environment(job, os.environ)
    run = started(bed, mpirun_command(job, ["-F", str(bed.ssh_config)]), environ, bed.shared)
    assert run.process.stdout
    # mpirun may say something of its own before.
    up = (line for line in run.process.stdout if line == "up\n")
    assert [next(up) for _ in range(2)] == ["up\n"] * 2
    bed.cable(2, plugged=False)
    since = time.monotonic()
    try:
        printed = run.process.communicate(timeout=300)[0]
        assert run.process.returncode not in (0, None), printed
        while processes_with(bed, "time.sleep(100)") and time.monotonic() - since < LIMIT:
            time.sleep(0.2)
        assert processes_with(bed, "time.sleep(100)") == []
        assert time.monotonic() - since < LIMIT
    finally:
        bed.cable(2, plugged=True)
