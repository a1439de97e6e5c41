"""Who a process is under each launcher, and what a hostfile says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_finetune.errors import LaunchError
from ds_finetune.system.world import World, accelerate_choices, master_port
from tests.conftest import ROOT

MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "gpu[08-10]"}


def test_without_a_launcher_the_world_is_one() -> None:
    assert World.from_environment({}) == World(0, 1, 0, 1, "python", master_port=0)


def test_two_plain_runs_on_one_machine_do_not_want_the_same_port() -> None:
    """Each opens its process group while the other still has its own; torch's default would be port 29500 for both."""
    code = "import os, sys, torch.distributed as d; from ds_finetune.system.world import World; World.from_environment(os.environ).set_environment(os.environ); "
    code += "d.init_process_group('gloo'); print('open', flush=True); sys.stdin.readline()"
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.Popen(command, cwd=ROOT, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.stdout.readline() for run in runs if run.stdout] == ["open\n", "open\n"]
    for run in runs:
        run.communicate("\n", timeout=300)


def test_standard_variables() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert World.from_environment(environ) == World(1, 2, 1, 2, "deepspeed", "h", 5)
    assert World.from_environment(environ | {"TORCHELASTIC_RUN_ID": "x"}).launcher == "torchrun"
    assert World.from_environment(environ | {"ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate"


def test_open_mpi_fills_what_deepspeed_looks_for() -> None:
    environ = MPI | {"MASTER_ADDR": "first"}
    World.from_environment(environ).set_environment(environ)
    assert [environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == [
        "3",
        "4",
        "1",
        "2",
        "first",
    ]
    assert environ["MASTER_PORT"].isdigit()


def test_open_mpi_on_several_hosts_needs_an_address() -> None:
    with pytest.raises(LaunchError, match=r"4 ranks on several hosts \(2 here\) and MASTER_ADDR is not set"):
        World.from_environment(MPI)


def test_slurm_meets_on_the_first_node() -> None:
    world = World.from_environment(SLURM)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.master_addr) == (
        5,
        6,
        1,
        2,
        "gpu08",
    )
    assert world.master_port == World.from_environment(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {
            "SLURM_NTASKS": "8",
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "4294967290",
        },
    ],
    ids=["salloc", "sbatch", "interactive step"],
)
def test_a_shell_inside_an_allocation_is_a_world_of_one(environ: dict[str, str]) -> None:
    assert World.from_environment(environ) == World(0, 1, 0, 1, "python", master_port=0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a,b", "a"),
        ("node[01-03,7]", "node01"),
        ("node[7,9-12]-ib,gpu2", "node7-ib"),
        ("rack[2-3]n[08-10]", "rack2n08"),
        ("gpu-1,node[2-3]", "gpu-1"),
    ],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert World.from_environment(SLURM | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_a_step_counts_its_own_tasks_and_two_steps_of_a_job_do_not_meet() -> None:
    step = SLURM | {"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "6"}
    assert World.from_environment(step).world_size == 6
    assert World.from_environment(step).master_port != World.from_environment(step | {"SLURM_STEP_ID": "1"}).master_port


def test_torchrun_on_each_host_of_a_scheduler_counts_its_own_ranks() -> None:
    inner = {
        "RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "TORCHELASTIC_RUN_ID": "x",
    }
    assert World.from_environment(SLURM | inner).launcher == "torchrun"
    inner = {
        "RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_SIZE": "8",
        "MASTER_ADDR": "a",
        "CROSS_SIZE": "2",
    }
    assert World.from_environment(SLURM | inner).launcher == "deepspeed"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is 0 but WORLD_SIZE, LOCAL_RANK is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE is 2 but the world size is 1"),
        ({"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}, "MPI_LOCALNRANKS is 4 but the world size is 1"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1 but the world size is 1"),
        ({"PALS_RANKID": "3"}, "PALS_RANKID is 3 but the world size is 1"),
        ({"NPROC_PER_NODE": "8"}, "NPROC_PER_NODE is 8 but the world size is 1"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES is 2 but the world size is 1"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE is 2"),
        ({"FLUX_JOB_SIZE": "16", "FLUX_TASK_RANK": "3"}, "FLUX_JOB_SIZE is 16"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_SIZE is 2"),
        ({"PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "PMI_SIZE is 2 but the world size is 1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 is not below world size 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 'x', not a number"),
        (MPI | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK is 0 but OMPI_COMM_WORLD_RANK is 3"),
        (MPI | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8 but OMPI_COMM_WORLD_SIZE is 4"),
        (SLURM | {"LOCAL_RANK": "0"}, "LOCAL_RANK is 0 but SLURM_LOCALID is 1"),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "WORLD_SIZE is 1 but SLURM_NTASKS is 6"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3 but tasks per node `2(x3)` describe 3 nodes"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "tasks per node `2(x` cannot be read at `2(x`"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[1-2"}, "SLURM_STEP_NODELIST `gpu[1-2` is not a list of nodes"),
        (
            {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
            "WORLD_SIZE is 16 with 8 ranks on this host, and MASTER_ADDR",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
            "local rank 3 of 2 does not fit rank 1 of 2",
        ),
    ],
)
def test_environments_that_cannot_be(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        World.from_environment(environ)
    assert message in caught.value.message


def test_ranks_of_other_launchers_are_read_where_the_user_names_them() -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    assert World.from_environment(ranks | hydra).world_size == 4
    assert World.from_environment({"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}).world_size == 1
    assert World.from_environment({"PMIX_RANK": "0", "NNODES": "1"}).world_size == 1
    assert World.from_environment(ranks | {"NNODES": "2", "NPROC_PER_NODE": "2", "PMIX_RANK": "1"}).rank == 1
    agents = {"PMI_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert World.from_environment(ranks | agents).world_size == 4


def test_a_pod_of_one_process_is_told_its_local_rank() -> None:
    pytorch_job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    with pytest.raises(LaunchError) as caught:
        World.from_environment(pytorch_job)
    assert caught.value.hint
    said = dict(part.split("=") for part in caught.value.hint.split() if "=" in part)
    assert World.from_environment(pytorch_job | said) == World(1, 2, 0, 1, "deepspeed", "h", 5)


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:80", "", "-1", "65536", "²", "1e3"])
@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, MPI, SLURM])
def test_a_port_that_is_none_is_one_error(environ: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError, match=r"MASTER_PORT is '.*', not a port from 0 to 65535") as caught:
        World.from_environment(environ | {"MASTER_ADDR": "a", "MASTER_PORT": text})
    assert "unset MASTER_PORT" in caught.value.hint
    assert master_port({"MASTER_PORT": "65535"}, 5) == 65535
    assert master_port({}, 5) == 5


def test_the_hostfile_of_a_deepspeed_above_is_read(tmp_path: Path) -> None:
    """The real ancestor: a program named `deepspeed` that starts this check as its child."""
    path = tmp_path / "hosts"
    path.write_text("worker-1 slots=0\n")
    launcher = tmp_path / "deepspeed"
    launcher.write_text(
        "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, '-c', sys.argv[-1]]).returncode)\n"
    )
    code = "from ds_finetune.system.world import check_deepspeed_hostfile; check_deepspeed_hostfile()"
    done = subprocess.run(
        [sys.executable, launcher, "-H", path, code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "host `worker-1` has slots=0" in done.stderr
    assert done.returncode == 1


def test_accelerate_choices() -> None:
    assert accelerate_choices({}) is None
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    environ |= {"ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}
    found = accelerate_choices(environ)
    assert found is not None
    assert (found.zero_stage, found.gradient_clipping, found.offload_param, found.mixed_precision) == (
        3,
        0.5,
        None,
        None,
    )
    assert accelerate_choices(environ | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "x.json"}).zero_stage is None  # type: ignore[union-attr]
