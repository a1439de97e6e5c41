"""The commands of every launcher, as values; that they start what they say is held in tests/cluster."""

import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ds_finetune.cluster.launch.commands import (
    ENTRY,
    Job,
    mpirun_command,
    srun_command,
    starting_environment,
)
from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.errors import LaunchError
from ds_finetune.system.rank_files import RUN_ID
from ds_finetune.system.world import slurm_nodes
from tests.conftest import ROOT

HOSTS = (Host("b", 2, 1), Host("a", 1, 2))
JOB = Job(
    "run.yaml",
    ("optim.lr=1e-5",),
    HOSTS,
    "r-1",
    "10.0.0.2",
    29_500,
    {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hunter2", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"},
    "/there",
    "python",
)
RANK = ["python", "-u", *ENTRY, "run.yaml", "optim.lr=1e-5"]
NAMES = ["GLOO_SOCKET_IFNAME", "HF_TOKEN", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", RUN_ID]
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c", "SLURM_CPUS_PER_TASK": "6"}
MAX_ARGUMENT, MAX_COMMAND = 128 * 1024, os.sysconf("SC_ARG_MAX")
"""Of Linux: one argument, and all of them with the environment."""


def test_what_every_rank_gets() -> None:
    assert sorted(JOB.environment) == sorted(NAMES)
    assert JOB.environment[RUN_ID] == "r-1"
    left_to_slurm = replace(JOB, hosts=(), master_addr="", master_port=0)
    assert set(left_to_slurm.environment) == {RUN_ID, *JOB.variables}
    assert left_to_slurm.world_size == 0


def test_mpirun() -> None:
    argv = mpirun_command(JOB, ["-F", "cfg"])
    assert argv[: argv.index("--wdir")] == [
        *["mpirun", "--allow-run-as-root", "-np", "3", "--host", "b,b,a", "--map-by", "seq", "--bind-to", "none"],
        *["--mca", "plm_rsh_agent", "ssh -F cfg", "--mca", "plm_rsh_no_tree_spawn", "1"],
        *[
            "--mca",
            "oob_tcp_keepalive_time",
            "5",
            "--mca",
            "oob_tcp_keepalive_intvl",
            "5",
            "--mca",
            "oob_tcp_keepalive_probes",
            "2",
        ],
        *["--mca", "oob_tcp_if_include", "ib0"],
    ]
    assert argv[argv.index("--wdir") :] == [
        "--wdir",
        "/there",
        *[word for name in sorted(NAMES) for word in ("-x", name)],
        *RANK,
    ]


def test_no_value_stands_in_a_command() -> None:
    for argv in (mpirun_command(JOB), srun_command(JOB, ALLOCATION)):
        assert "hunter2" not in shlex.join(argv)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (Host("a", 1, 4, user="me"), "line 4 of the hostfile: `me@a`, port 0, devices all"),
        (Host("a", 1, 4, port=22), "port 22"),
        (Host("a", 2, 4, devices=(0, 3)), "devices 0,3"),
    ],
)
def test_what_mpirun_and_slurm_cannot_be_told(host: Host, message: str) -> None:
    job = replace(JOB, hosts=(host,))
    for name, command in (("mpirun", mpirun_command), ("slurm", lambda job: srun_command(job, ALLOCATION))):
        with pytest.raises(LaunchError, match=f"--launcher {name} has no options") as caught:
            command(job)
        assert message in caught.value.message
        assert caught.value.hint.endswith(", or use --launcher torchrun")
        assert ("--ssh-args" in caught.value.hint) is (name == "mpirun")


def test_mpirun_takes_no_ipv6_address() -> None:
    with pytest.raises(LaunchError, match="mpirun would read the IPv6 address `fe80::1`"):
        mpirun_command(replace(JOB, hosts=(HOSTS[0], Host("fe80::1", 2, 3))))


def test_arguments_of_ssh_that_mpirun_would_split() -> None:
    with pytest.raises(LaunchError, match="mpirun splits the ssh arguments"):
        mpirun_command(JOB, ["-o", "ProxyCommand=ssh gate"])


def test_srun_on_chosen_hosts_and_on_all() -> None:
    exported = "--export=HOME,USER,LOGNAME," + ",".join(sorted(NAMES))
    fixed = ["--kill-on-bad-exit=1", "--overlap", "--unbuffered", "--mpi=none", "--chdir=/there", exported]
    placed = ["--ntasks=3", "--nodelist=b,b,a", "--distribution=arbitrary", "--cpus-per-task=6"]
    assert srun_command(JOB, ALLOCATION) == ["srun", *placed, *fixed, *RANK]
    everywhere = srun_command(replace(JOB, hosts=()), {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"})
    assert everywhere == ["srun", "--distribution=block", *fixed, *RANK]


def test_slurm_needs_an_allocation() -> None:
    with pytest.raises(LaunchError, match="SLURM_JOB_ID is not one of the 0 environment variables"):
        srun_command(JOB, {})
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST `` is not a list of nodes"):
        srun_command(JOB, {"SLURM_JOB_ID": "7"})


def test_hosts_outside_of_the_allocation() -> None:
    with pytest.raises(LaunchError, match="host `d` is not one of the 3 nodes of the Slurm allocation: a, b, c"):
        srun_command(replace(JOB, hosts=(HOSTS[0], Host("d", 1, 3))), ALLOCATION)


_WRITTEN_OUT = {
    "n1": ["n1"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[01-03,7],gpu2": ["n01", "n02", "n03", "n7", "gpu2"],
    "rack[1-2]n[08-10]": ["rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"],
    "a,b,c": ["a", "b", "c"],
    "n[099-101]": ["n099", "n100", "n101"],
    "x-1-[3,5-6],y": ["x-1-3", "x-1-5", "x-1-6", "y"],
}


@pytest.mark.parametrize("text", _WRITTEN_OUT)
def test_allocated_nodes(text: str) -> None:
    assert slurm_nodes({"SLURM_JOB_NODELIST": text}, "SLURM_JOB_NODELIST") == _WRITTEN_OUT[text]


@pytest.mark.parametrize("text", _WRITTEN_OUT)
def test_node_lists_are_what_slurm_says(text: str, tmp_path: Path) -> None:
    if not shutil.which("scontrol"):
        pytest.skip("Slurm's scontrol is not installed (Debian: slurm-client)")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=none\n")
    environ = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    said = subprocess.run(
        ["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True, env=environ
    )
    assert said.stdout.split() == _WRITTEN_OUT[text]


def test_the_program_itself_gets_no_more_than_it_needs() -> None:
    here = {
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/s",
        "RANK": "0",
        "AWS_SECRET": "x",
        "SLURM_JOB_ID": "7",
        "OMPI_MCA_btl": "tcp",
        "NCCL_DEBUG": "WARN",
    }
    for_mpi = starting_environment(JOB, here)
    assert for_mpi == {"HOME": "/root", "SSH_AUTH_SOCK": "/s", "OMPI_MCA_btl": "tcp", **JOB.environment}
    assert starting_environment(JOB, here, slurm=True) == for_mpi | {"SLURM_JOB_ID": "7"}


def test_sixty_four_hosts_of_eight() -> None:
    hosts = read_hostfile(ROOT / "hostfiles" / "nodes64")
    job = replace(JOB, hosts=hosts)
    names = [f"node{n:02}" for n in range(1, 65) for _ in range(8)]
    mpi, slurm = mpirun_command(job), srun_command(job, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[01-64]"})
    assert (mpi[mpi.index("-np") + 1], mpi[mpi.index("--host") + 1].split(",")) == ("512", names)
    assert "--ntasks=512" in slurm
    assert next(word for word in slurm if word.startswith("--nodelist="))[len("--nodelist=") :].split(",") == names
    for argv in (mpi, slurm):
        assert max(map(len, argv)) < MAX_ARGUMENT
        assert sum(map(len, argv)) < MAX_COMMAND / 2
        assert subprocess.run(["true", *argv[1:]], check=False).returncode == 0
