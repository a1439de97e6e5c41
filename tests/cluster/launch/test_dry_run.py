"""What a dry run says of a start, down to the rank map of 64 x 8."""

import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from ds_finetune.cluster.launch.commands import Job, dry_run_lines, mpirun_command, rank_map
from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.plan.mesh import Mesh
from tests.conftest import ROOT

HOSTS = (Host("long-name", 2, 1), Host("b", 4, 2, devices=(0, 1, 2, 5)))
JOB = Job("run.yaml", (), HOSTS[:1], "r-1", "10.0.0.2", 29_500, {"HF_TOKEN": "hunter2"}, "ib0", "/there", "python")


def test_commands() -> None:
    head = ["run r-1: 2 ranks on 1 hosts by mpirun, rank 0 at 10.0.0.2:29500", "network interface ib0 on every host"]
    lines = dry_run_lines(JOB, "mpirun", environ={}, ssh_args=["-F", "cfg"])
    assert lines[:2] == head
    assert lines[2].startswith("mpirun --allow-run-as-root -np 2 --host long-name,long-name")
    assert shlex.split(lines[2]) == mpirun_command(JOB, ["-F", "cfg"])
    allocated = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    lines = dry_run_lines(replace(JOB, hosts=(), master_addr="", interface=""), "slurm", environ=allocated)
    assert lines[0] == "run r-1: all ranks on all hosts by slurm, rank 0 at the first node of the allocation"
    assert lines[1].startswith("srun --distribution=block --kill-on-bad-exit=1")


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "slurm"])
def test_commands_are_shown_without_secrets(launcher: str) -> None:
    job = replace(JOB, overrides=("data.train=https://me:hunter2@host/x",), interface="")
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "long-name"}
    text = "\n".join(dry_run_lines(job, launcher, environ=environ))
    assert "data.train=***" in text
    assert "hunter2" not in text


def test_commands_of_many_hosts() -> None:
    job = replace(JOB, hosts=read_hostfile(ROOT / "hostfiles" / "nodes64"), interface="")
    lines = dry_run_lines(job, "torchrun", environ={})
    assert lines[0].startswith("run r-1: 512 ranks on 64 hosts by torchrun")
    assert [line.split(":")[0] for line in lines[1:]] == [
        *[
            "as if typed on node01",
            "as if typed on node02",
            "... and on 60 more hosts",
            "as if typed on node63",
            "as if typed on node64",
        ]
    ]
    assert "--node-rank=63" in lines[-1]


def test_rank_map_of_unequal_hosts() -> None:
    assert rank_map(HOSTS, Mesh.of(ParallelConfig(tp=2), world_size=6, rank=0)) == [
        "long-name  ranks 0-1  devices 0-1  dp 0  tp 0-1",
        "b          ranks 2-5  devices 0-2,5  dp 1-2  tp 0-1",
        "tp: 3 groups of 2, each within a host",
    ]
    assert rank_map(HOSTS, Mesh.of(ParallelConfig(sp=3), world_size=6, rank=0))[2:] == [
        "sp: 2 groups of 3, 1 of them across hosts"
    ]


@pytest.mark.parametrize(
    ("parallel", "first", "last", "groups"),
    [
        (ParallelConfig(), "dp 0-7", "dp 504-511", []),
        (ParallelConfig(tp=8), "dp 0  tp 0-7", "dp 63  tp 0-7", ["tp: 64 groups of 8, each within a host"]),
        (
            ParallelConfig(pp=4, tp=8),
            "pp 0  dp 0  tp 0-7",
            "pp 3  dp 15  tp 0-7",
            ["pp: 128 groups of 4, 128 of them across hosts", "tp: 64 groups of 8, each within a host"],
        ),
        (
            ParallelConfig(ep=16),
            "dp 0-7  ep 0-7",
            "dp 504-511  ep 8-15",
            ["ep: 32 groups of 16, 32 of them across hosts"],
        ),
    ],
)
def test_rank_map_of_sixty_four_hosts_of_eight(
    parallel: ParallelConfig, first: str, last: str, groups: list[str]
) -> None:
    lines = rank_map(read_hostfile(ROOT / "hostfiles" / "nodes64"), Mesh.of(parallel, world_size=512, rank=0))
    assert lines[0] == f"node01  ranks 0-7  devices 0-7  {first}"
    assert lines[63] == f"node64  ranks 504-511  devices 0-7  {last}"
    assert lines[64:] == groups


def test_it_loads_no_torch() -> None:
    code = "import sys, ds_finetune.cluster.launch.commands, ds_finetune.cluster.launch.emit; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
