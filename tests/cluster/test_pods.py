"""What the pods of the emitted Kubernetes job run, on two hosts that have the pods' names: the same losses as one host."""

import os
from pathlib import Path

import pytest
import yaml

from ds_finetune.launch.emit import Order, emitted
from tests.cluster.bed import Bed
from tests.cluster.training import ZERO3, job_on, losses_of_two_ranks, name_hosts, started, traveling
from tests.running import metrics, tiny_task

pytestmark = pytest.mark.slow


def test_two_pods_train_as_one_host(bed: Bed, tmp_path: Path) -> None:
    folder = bed.shared / "pods"
    job = job_on(bed, tiny_task(folder, deepspeed=ZERO3), 1, 1)
    service, manifest = yaml.safe_load_all(emitted("k8s", Order(job=job, name="tiny", cpus=1)))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    # Names of an Indexed Job's pods in its headless Service, within one namespace.
    count = manifest["spec"]["completions"]
    name_hosts(bed, [f"{manifest['metadata']['name']}-{index}.{service['metadata']['name']}" for index in range(count)])
    image = {name: value for name, value in traveling().items() if name in ("PATH", "PYTHONPATH", "TORCH_EXTENSIONS_DIR")}
    environ = {"HOME": os.environ["HOME"], **image, **{entry["name"]: entry["value"] for entry in container["env"]}}
    pods = []
    for index in range(count):
        argv = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in (*container["command"], *container["args"])]
        pods.append(started(bed, argv, environ, folder, number=index + 1))
    printed = [pod.process.communicate(timeout=250)[0] for pod in pods]
    assert [pod.process.returncode for pod in pods] == [0, 0], printed
    assert "started by torchrun" in printed[0]
    assert [record["train/loss"] for record in metrics(folder)] == pytest.approx(losses_of_two_ranks(tmp_path), abs=2e-6)
