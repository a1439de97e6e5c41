"""What a dry run says of a start."""

import shlex
import subprocess
import sys
from dataclasses import replace

from ds_finetune.cluster.launch.commands import Job, dry_run_lines, mpirun_command
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host, read_hostfile
from tests.conftest import ROOT

HOSTS = (Host("long-name", 2, 1), Host("b", 4, 2, devices=(0, 1, 2, 5)))
JOB = Job("run.yaml", (), HOSTS[:1], "r-1", "10.0.0.2", 29_500, {"HF_TOKEN": "hunter2"}, "/there", "python")


def test_commands() -> None:
    head = ["run r-1: 2 ranks on 1 hosts by mpirun", "host       ranks  devices", "long-name  0-1    0-1"]
    lines = dry_run_lines(JOB, "mpirun", environ={}, remote=Remote(ssh_args=("-F", "cfg")))
    assert lines[:3] == head
    assert lines[3].startswith("mpirun --allow-run-as-root -np 2 --host long-name,long-name")
    assert shlex.split(lines[3]) == mpirun_command(JOB, ["-F", "cfg"])
    allocated = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    lines = dry_run_lines(replace(JOB, hosts=(), master_addr=""), "slurm", environ=allocated, remote=Remote())
    assert lines[0] == "run r-1: all ranks on all hosts by slurm"
    assert lines[1].startswith("srun --distribution=block --kill-on-bad-exit=1")
    assert "hunter2" not in "".join(lines)


def test_ranks_of_unequal_hosts() -> None:
    lines = dry_run_lines(replace(JOB, hosts=HOSTS), "torchrun", environ={}, remote=Remote())
    assert lines[:4] == [
        "run r-1: 6 ranks on 2 hosts by torchrun",
        "host       ranks  devices",
        "long-name  0-1    0-1",
        "b          2-5    0-2,5",
    ]


def test_how_each_host_is_reached() -> None:
    """A line of ssh for each host, which starts the agent in the working folder; nothing but Python on this machine."""
    here, remote = Host("127.0.0.1", 1, 1), Remote(("-F", "cfg"), "/there/python", "/a b", 22, 30)
    there = Host("b", 4, 2, user="me", port=2222)
    lines = dry_run_lines(replace(JOB, hosts=(here, there)), "torchrun", environ={}, remote=remote)
    agent = ["/there/python", "-P", "-u", "-m", "ds_finetune.cluster.host_functions", "r-1"]
    assert shlex.split(lines[4]) == agent
    ssh = shlex.split(lines[5])
    assert ssh[:4] == ["ssh", "-F", "cfg", "-o"]
    assert ssh[-4:-1] == ["-p", "2222", "me@b"]
    assert {"BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=10"} <= {*ssh}
    assert ssh[-1].startswith("cd '/a b' && exec env PYTHONPATH=")
    assert shlex.split(ssh[-1])[-len(agent) :] == agent
    assert lines[6:] == ["python -u -m ds_finetune.cluster.worker run.yaml"]


def test_ranks_of_sixty_four_hosts_of_eight() -> None:
    job = replace(JOB, hosts=read_hostfile(ROOT / "hostfiles" / "nodes64"))
    lines = dry_run_lines(job, "torchrun", environ={}, remote=Remote())
    assert [lines[2].split(), lines[65].split()] == [["node01", "0-7", "0-7"], ["node64", "504-511", "0-7"]]


def test_it_loads_no_torch() -> None:
    code = "import sys, ds_finetune.cluster.launch.commands; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
