"""The documented command of Kubernetes pods, on two hosts that have the pods' names: the same losses as one host."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.bed import INTERFACE, Bed
from tests.cluster.training import ZERO3, Started, documented, losses_of_two_ranks, name_hosts, started, traveling
from tests.running import metrics, tiny_task

pytestmark = pytest.mark.slow


def _pods(bed: Bed, folder: Path, **sections: Any) -> list[Started]:
    """Start what the pods run, each on a host of its own."""
    text = documented("Kubernetes").replace("NAME", "tiny").replace("--nnodes=4", "--nnodes=2")
    text = text.replace("--nproc-per-node=8", "--nproc-per-node=1")
    container = yaml.safe_load(text.replace("RUN.yaml", str(tiny_task(folder, deepspeed=ZERO3, **sections))))
    # Names of an Indexed Job's pods in its headless Service, within one namespace.
    name_hosts(bed, [f"tiny-{index}.tiny" for index in range(2)])
    environ = traveling() | {entry["name"]: entry["value"] for entry in container["env"]}
    environ |= {"HOME": os.environ["HOME"], "GLOO_SOCKET_IFNAME": INTERFACE}
    words = container["command"]
    return [
        started(
            bed,
            [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words],
            environ,
            folder,
            number=index + 1,
        )
        for index in range(2)
    ]


def test_two_pods_train_as_one_host(bed: Bed, tmp_path: Path) -> None:
    pods = _pods(bed, bed.shared / "pods")
    printed = [pod.process.communicate(timeout=250)[0] for pod in pods]
    assert [pod.process.returncode for pod in pods] == [0, 0], printed
    assert "started by torchrun" in printed[0]
    assert [record["train/loss"] for record in metrics(bed.shared / "pods")] == pytest.approx(
        losses_of_two_ranks(tmp_path), abs=2e-6
    )


def test_a_pod_that_is_told_to_go_saves_the_run(bed: Bed) -> None:
    """Kubernetes sends SIGTERM to the first process of a container, which is torchrun."""
    folder = bed.shared / "told"
    pods = _pods(bed, folder, train={"for": "5000 steps"})
    pods[1].wait_for_steps()
    (launcher,) = [
        pid
        for pid in bed.hosts[1].pids()
        if b"--node-rank=1" in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    ]
    os.kill(launcher, signal.SIGTERM)
    printed = [pod.process.communicate(timeout=100)[0] for pod in pods]
    assert all(pod.process.returncode for pod in pods), printed
    steps = [int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").glob("step-*")]
    assert max(steps) == metrics(folder)[-1]["step"]
