"""What the pods of the emitted Kubernetes job run, on two hosts that have the pods' names: the same losses as one host."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune.cluster.launch.emit import EmitRequest, render_file
from tests.cluster.bed import Bed
from tests.cluster.training import ZERO3, Started, job_on, losses_of_two_ranks, name_hosts, started, traveling
from tests.running import metrics, tiny_task

pytestmark = pytest.mark.slow


def _pods(bed: Bed, folder: Path, **sections: Any) -> list[Started]:
    """Start what the emitted job's pods run, each on a host of its own."""
    job = job_on(bed, tiny_task(folder, deepspeed=ZERO3, **sections), 1, 1)
    service, manifest = yaml.safe_load_all(render_file("k8s", EmitRequest(job=job, name="tiny", cpus=1)))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    # Names of an Indexed Job's pods in its headless Service, within one namespace.
    count = manifest["spec"]["completions"]
    name_hosts(bed, [f"{manifest['metadata']['name']}-{index}.{service['metadata']['name']}" for index in range(count)])
    image = {
        name: value for name, value in traveling().items() if name in ("PATH", "PYTHONPATH", "TORCH_EXTENSIONS_DIR")
    }
    environ = {"HOME": os.environ["HOME"], **image, **{entry["name"]: entry["value"] for entry in container["env"]}}
    words = [*container["command"], *container["args"]]
    return [
        started(
            bed,
            [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words],
            environ,
            folder,
            number=index + 1,
        )
        for index in range(count)
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
