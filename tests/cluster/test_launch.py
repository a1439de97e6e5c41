"""`ds-finetune launch` on hosts of the test bed: the run of one process, and everything that keeps it from being
started.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_finetune.errors import USER_ERROR_EXIT_CODE
from tests.cluster.bed import Bed
from tests.cluster.faults import PATIENCE_SECONDS, launched
from tests.running import metrics, start, tiny_task


@pytest.fixture(scope="module")
def task(bed: Bed) -> Path:
    """Three steps of twelve rows, in a folder that all hosts share."""
    return tiny_task(bed.shared / "task", train={"global_batch_size": 12})


def test_the_losses_are_those_of_one_process(bed: Bed, task: Path, tmp_path: Path) -> None:
    slots = (2, 1)
    alone = start([sys.executable, "ds_finetune/train.py", str(tiny_task(tmp_path, train={"global_batch_size": 12}))])
    assert alone.returncode == 0, alone.stderr
    wanted = [record["train/loss"] for record in metrics(tmp_path)]
    with launched(bed, task, slots=slots) as run:
        assert run.process.wait(PATIENCE_SECONDS) == 0, run.said()
        assert [record["train/loss"] for record in run.records()] == pytest.approx(wanted, abs=1e-5)
        assert re.search(
            r"^host +ranks +devices +interface\n10\.77\.0\.1 +0-1 .*e0\n10\.77\.0\.2 +2 .*e0$", run.said(), re.M
        )
        logs = {path.name for path in (run.folder / "logs" / run.run_id() / "attempt-1").glob("rank-*")}
        assert logs == {f"rank-{rank:05d}.log" for rank in range(sum(slots))}
        assert not run.left()


def test_a_mistake_that_ranks_find_is_exit_code_2(bed: Bed, task: Path) -> None:
    with launched(bed, task, "data.train=nowhere.jsonl", "launch.restarts=3", slots=(1,)) as run:
        assert run.process.wait(PATIENCE_SECONDS) == USER_ERROR_EXIT_CODE, run.said()
        assert "nowhere.jsonl" in run.said()
        assert "starting again" not in run.said()


def _launch(bed: Bed, task: Path, hosts: str, *options: str, ssh: str = "") -> subprocess.CompletedProcess[str]:
    hostfile = bed.shared / "hosts"
    hostfile.write_text(hosts)
    argv = [sys.executable, "-m", "ds_finetune", "launch", str(task), "--hostfile", str(hostfile), *options]
    environ = {"DS_ACCELERATOR": "cpu", "DS_FINETUNE_SSH_ARGS": ssh or f"-F {bed.ssh_config}", "GLOO_SOCKET_IFNAME": ""}
    return bed.run(1, argv, {name: value for name, value in environ.items() if value}, timeout=PATIENCE_SECONDS)


def _no_torch(bed: Bed) -> str:
    """A folder that makes a host say it has another torch, where it is read before the real one; the other hosts do not
    see it.
    """
    folder = bed.folder / "own-2" / "torch-9.9.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return f"{bed.own}:{os.environ.get('PYTHONPATH', '')}"


def test_what_is_wrong_is_said_for_each_host_and_nothing_is_started(bed: Bed, task: Path) -> None:
    two = f"{bed.hosts[0].address} slots=1\n{bed.hosts[1].address} slots=1\n"
    wrong_key = bed.folder / "wrong-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(wrong_key)], check=True)
    other = bed.ssh_config.with_name("other_config")
    other.write_text(bed.ssh_config.read_text().replace(f"{bed.folder}/key", str(wrong_key)))
    cases = [
        (
            _launch(bed, task, two, ssh=f"-F {other}"),
            r"10\.77\.0\.2 \(line 2\): ssh: .*Permission denied",
        ),
        (
            _launch(bed, task, two + "10.77.0.2:22 slots=1\n"),
            r"10\.77\.0\.2 \(line 3\): it (?:has|is) the same ",
        ),
        (_launch(bed, task, two, "--port", "22"), r"10\.77\.0\.1: port 22 is taken"),
        (_launch(bed, task, two, "train.global_batch_size=7"), r"global_batch_size.*7"),
        (_launch(bed, task, two, "--include", "10.77.0.9"), r"names host `10\.77\.0\.9`, which is not among the 2"),
    ]
    for done, message in cases:
        assert done.returncode == USER_ERROR_EXIT_CODE, done.stdout + done.stderr
        assert re.search(message, done.stdout + done.stderr), done.stdout + done.stderr
        assert "ranks  devices" not in done.stdout


def test_a_host_with_another_torch_is_named(bed: Bed, task: Path) -> None:
    hostfile = bed.hostfile(1, 1, 1)
    argv = [sys.executable, "-m", "ds_finetune", "launch", str(task), "--hostfile", str(hostfile)]
    environ = {"DS_ACCELERATOR": "cpu", "DS_FINETUNE_SSH_ARGS": f"-F {bed.ssh_config}", "PYTHONPATH": _no_torch(bed)}
    done = bed.run(1, argv, environ, timeout=PATIENCE_SECONDS)
    assert done.returncode == USER_ERROR_EXIT_CODE
    assert re.search(r"10\.77\.0\.2 \(line 2\): torch 9\.9 \(here 2\.", done.stderr), done.stderr


def test_a_dry_run_of_many_hosts_asks_none(task: Path) -> None:
    sizes = ["train.global_batch_size=512", "train.micro_batch_size=1"]
    done = start(
        [
            sys.executable,
            "-m",
            "ds_finetune",
            "launch",
            str(task),
            *sizes,
            "--dry-run",
            "--hostfile",
            "hostfiles/nodes64",
        ]
    )
    assert done.returncode == 0, done.stderr
    assert "512 ranks on 64 hosts" in done.stdout
    assert re.search(r"^node64 +504-511 ", done.stdout, re.MULTILINE)
