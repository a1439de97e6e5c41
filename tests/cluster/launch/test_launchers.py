"""The same file under every launcher: two ranks, ZeRO-2, three steps, the same losses."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.forks import Forkserver
from tests.launched import SOCKET
from tests.running import metrics, start, tiny_task, torchrun

TRAIN = "ds_finetune/train.py"
LAUNCHED = ("tests/launched.py", TRAIN)
"""TRAIN as a fork with what the launcher gives it; `python` itself starts TRAIN."""
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"deepspeed_config_file": "ds_configs/zero2.json", "zero3_init_flag": False},
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_process_port": 29511,
    "use_cpu": False,
    "mixed_precision": "no",
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the run in one process."""
    folder = tmp_path_factory.mktemp("plain")
    done = start([sys.executable, TRAIN, str(tiny_task(folder))])
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["train/loss"] for record in metrics(folder)]


def _hostfile(folder: Path) -> str:
    (folder / "hosts").write_text("localhost slots=2\n")
    return str(folder / "hosts")


def _accelerate(folder: Path) -> str:
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(ACCELERATE))
    return str(folder / "accelerate.yaml")


NO_SSH = ("--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", "29513")
"""One host stands for several: `deepspeed` is started by hand on each."""
COMMANDS: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "module": ("python", lambda run, _: [sys.executable, "-m", "ds_finetune", "train", run]),
    "console": ("python", lambda run, _: ["ds-finetune", "train", run]),
    "torchrun": ("torchrun", lambda run, _: torchrun(*LAUNCHED, run)),
    "deepspeed": (
        "deepspeed",
        lambda run, _: ["deepspeed", "--num_gpus", "2", "--master_port", "29512", *LAUNCHED, run],
    ),
    "hostfile": (
        "deepspeed",
        lambda run, folder: ["deepspeed", "--hostfile", _hostfile(folder), *NO_SSH, *LAUNCHED, run],
    ),
    "mpirun": (
        "mpirun",
        lambda run, _: ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, *LAUNCHED, run],
    ),
    "accelerate": (
        "accelerate",
        lambda run, folder: ["accelerate", "launch", "--config_file", _accelerate(folder), *LAUNCHED, run],
    ),
}


BY_DEFAULT = [name for name in COMMANDS if name != "hostfile"]
"""Beside the marker: with a hostfile `deepspeed` starts the ranks of a host as it does without, and
tests/cluster/test_launch.py has it start those of two.
"""


@pytest.mark.parametrize("name", [*BY_DEFAULT, pytest.param("hostfile", marks=pytest.mark.slow)])
def test_launcher(name: str, wanted: list[float], tmp_path: Path) -> None:
    launcher, command = COMMANDS[name]
    run_file = tiny_task(tmp_path, deepspeed=None if name == "accelerate" else {"zero_optimization": {"stage": 2}})
    done = start(command(str(run_file), tmp_path), {SOCKET: Forkserver.get().address}, fork=name == "module")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"started by {launcher}" in done.stdout
    assert ("1 on cpu" if launcher == "python" else "2 on cpu") in done.stdout
    assert "ZeRO-2" in done.stdout
    assert [record["train/loss"] for record in metrics(tmp_path)] == pytest.approx(wanted, abs=2e-6)


def test_srun_by_its_environment(wanted: list[float], tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path)
    common = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    common |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "2",
    }
    common |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here", "SLURM_NODEID": "0"}
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    ranks = [
        Forkserver.get().start(
            [TRAIN, str(run_file)],
            common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            ranks=0,
            out=log,
            err=log,
        )
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(200) for process in ranks]
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0], printed
    assert "started by srun" in printed[0]
    assert [record["train/loss"] for record in metrics(tmp_path)] == pytest.approx(wanted, abs=2e-6)


def test_accelerate_that_contradicts_the_run_file_is_refused(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path)
    tree = ACCELERATE | {
        "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 1, "zero3_init_flag": False},
        "main_process_port": 29514,
    }
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(tree))
    command = ["accelerate", "launch", "--config_file", str(tmp_path / "accelerate.yaml"), *LAUNCHED, str(run_file)]
    done = start(command, {SOCKET: Forkserver.get().address})
    assert done.returncode != 0
    assert "accelerate's zero_stage 3 contradicts zero_optimization.stage 2" in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_a_missing_hostfile_is_not_a_local_run(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path)
    done = start(["deepspeed", "--hostfile", str(tmp_path / "none"), "--num_gpus", "1", TRAIN, str(run_file)])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "hostfile" in done.stderr
    assert not (tmp_path / "run").exists()
