"""Files for Slurm, Kubernetes and containers: parsed by what there is without the services. The script runs in
tests/cluster.
"""

import io
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune.cluster.launch.commands import Job
from ds_finetune.cluster.launch.emit import EmitRequest, container_file, render_file
from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.errors import LaunchError
from tests.conftest import ROOT

VARIABLES = {
    "NCCL_DEBUG": "INFO",
    "HF_TOKEN": "hunter2",
    "PATH": "/bin:/opt/bin",
    "HF_HOME": "/data/hub",
    "TORCH_MINE": 'a b\'c $(X) "d"',
}
HOSTS = (Host("a", 8, 1), Host("b", 8, 2))
ORDER = EmitRequest(
    job=Job(
        "runs/r.yaml",
        ("optim.lr=1e-5", "data.train=$(HOME)/x y"),
        HOSTS,
        "r1-20",
        variables=VARIABLES,
        directory="/work/my dir",
    ),
    name="r1",
)


def _check(script: str, folder: Path) -> None:
    """What bash and shellcheck say of a script."""
    (folder / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=folder, capture_output=True, check=False).returncode == 0
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    said = subprocess.run(
        ["shellcheck", "--severity=warning", "job.sh"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout


def _options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def test_script_of_slurm(tmp_path: Path) -> None:
    script = render_file("slurm", ORDER)
    _check(script, tmp_path)
    assert _options(script) == {
        "job-name": "r1",
        "nodes": "2",
        "ntasks-per-node": "8",
        "cpus-per-task": "8",
        "gpus-per-node": "8",
        "time": "24:00:00",
        "signal": "B:USR1@300",
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": "",
    }
    (line,) = re.findall(r"^srun .*$", script, re.MULTILINE)
    assert shlex.split(line)[-7:] == [
        "-u",
        "-m",
        "ds_finetune.cluster.worker",
        "runs/r.yaml",
        "optim.lr=1e-5",
        "data.train=$(HOME)/x y",
        "&",
    ]
    assert {"--ntasks=16", "--nodes=2", "--cpus-per-task=8", "--kill-on-bad-exit=1"} <= set(shlex.split(line))


def test_variables_of_the_script_are_what_was_given(tmp_path: Path) -> None:
    """The part that sets them, run by bash, gives every rank the same values; without the secret it does not start."""
    script = render_file("slurm", ORDER)
    assert "hunter2" not in script
    part = script.split("nothing else does.\n")[1].split("\n\n")[0]
    (tmp_path / "part.sh").write_text(f"set -eu\n{part}\nenv -0\n")
    run = ["env", "-i", "bash", "part.sh"]
    refused = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "HF_TOKEN: set it where you submit" in refused.stderr
    shown = subprocess.run(
        [*run[:2], "HF_TOKEN=mine", *run[2:]], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    values = dict(entry.split("=", 1) for entry in shown.split("\0") if entry)
    assert {name: values[name] for name in VARIABLES} == VARIABLES | {"HF_TOKEN": "mine"}
    (exported,) = re.findall(r"--export=(\S+)", script)
    set_in_script = {"MASTER_ADDR", "MASTER_PORT", "DS_FINETUNE_RUN_ID"}
    assert set(exported.split(",")) == {*VARIABLES, "HOME", "USER", "LOGNAME", *set_in_script}


SECRETS = {
    "HF_PASS": "hunter2",
    "WANDB_PWD": "hunter2",
    "MLFLOW_HEADER": "Bearer hunter2hunter2",
    "https_proxy": "http://me:hunter2@proxy:1",
    "ANY": "hunter2",
}


@pytest.mark.parametrize("kind", ["slurm", "k8s"])
def test_secrets_are_taken_from_the_environment_when_the_file_is_used(kind: str) -> None:
    text = render_file(kind, replace(ORDER, job=replace(ORDER.job, variables=SECRETS), named=frozenset(SECRETS)))
    assert "hunter2" not in text
    for name in SECRETS:
        assert (f'export {name}="${{{name}:?' if kind == "slurm" else f"key: {name}\n") in text


@pytest.mark.parametrize("kind", ["slurm", "k8s"])
def test_an_override_with_a_password_is_refused(kind: str) -> None:
    request = replace(
        ORDER,
        job=replace(ORDER.job, overrides=("eval.generate.max_new_tokens=9", "data.train=https://me:hunter2@host/x")),
    )
    with pytest.raises(LaunchError, match=r"the override data\.train=\*\*\* looks like a secret") as caught:
        render_file(kind, request)
    assert "hunter2" not in str(caught.value)


def _documents(request: EmitRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(render_file("k8s", request))
    return service, job


def test_manifests_of_kubernetes() -> None:
    service, job = _documents(ORDER)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert container["resources"] == {"requests": {"cpu": 64}, "limits": {"nvidia.com/gpu": 8}}
    assert container["args"][:5] == [
        *[
            "--nnodes=2",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            "--nproc-per-node=8",
            "--master-addr=r1-0.r1",
            "--master-port=29500",
        ]
    ]
    assert container["args"][-3:] == ["runs/r.yaml", "optim.lr=1e-5", "data.train=$$(HOME)/x y"]
    # A pod is NAME-INDEX of the Job, found as that in the Service that is its subdomain.
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == "r1"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]} == {
        "/workspace/runs": "runs",
        "/dev/shm": "shm",
    }
    assert {volume["name"] for volume in pod["volumes"]} == {"runs", "shm"}
    assert (pod["restartPolicy"], spec["backoffLimit"]) == ("Never", 0)
    (patience,) = [
        int(entry["value"]) for entry in container["env"] if entry["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    ]
    assert patience < pod["terminationGracePeriodSeconds"]


def test_variables_of_the_manifests() -> None:
    text = render_file("k8s", ORDER)
    assert "hunter2" not in text
    assert "# Left out, being paths of the machine it was written on: HF_HOME, PATH\n" in text
    assert "kubectl create secret generic r1 --from-literal" in text
    variables = {
        entry["name"]: entry for entry in _documents(ORDER)[1]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "r1", "key": "HF_TOKEN"}}
    assert variables["TORCH_MINE"]["value"] == VARIABLES["TORCH_MINE"].replace("$(", "$$(")
    assert set(variables) == {
        "DS_FINETUNE_RUN_ID",
        "HF_TOKEN",
        "NCCL_DEBUG",
        "TORCH_MINE",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    }
    named = _documents(replace(ORDER, named=frozenset({"HF_HOME"})))[1]["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]
    assert {"name": "HF_HOME", "value": "/data/hub"} in named


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("variables", [VARIABLES, {"DS_ACCELERATOR": "cpu"}], ids=["gpu", "cpu"])
def test_manifests_are_what_kubernetes_takes(version: str, variables: dict[str, str]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate, which has the schemas, is not installed"
    )
    request = replace(ORDER, job=replace(ORDER.job, variables=variables))
    for document in _documents(request):
        validate.validate(document, version, strict=True)
    broken = _documents(request)[1]
    broken["spec"]["template"]["spec"]["subdomains"] = "r1"
    with pytest.raises(validate.ValidationError, match="subdomains"):
        validate.validate(broken, version, strict=True)


def test_on_the_cpu_no_gpu_is_asked_for() -> None:
    request = replace(ORDER, job=replace(ORDER.job, variables={"DS_ACCELERATOR": "cpu"}))
    assert "gpus" not in render_file("slurm", request)
    assert "nvidia.com" not in render_file("k8s", request)


def test_sixty_four_hosts_of_eight(tmp_path: Path) -> None:
    request = replace(ORDER, job=replace(ORDER.job, hosts=read_hostfile(ROOT / "hostfiles" / "nodes64")))
    script = render_file("slurm", request)
    _check(script, tmp_path)
    assert (_options(script)["nodes"], _options(script)["ntasks-per-node"]) == ("64", "8")
    assert "--nodes=64 --ntasks=512 " in script
    spec = _documents(request)[1]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (64, 64)
    assert spec["template"]["spec"]["containers"][0]["args"][:3] == [
        "--nnodes=64",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--nproc-per-node=8",
    ]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("slurm", {"hosts": (Host("a", 8, 1), Host("b", 4, 2))}, "the hostfile has slots 8 (`a`) and 4 (`b`)"),
        ("k8s", {"hosts": (Host("a", 8, 1), Host("b", 4, 2))}, "the hostfile has slots 8 (`a`) and 4 (`b`)"),
        ("k8s", {"hosts": (Host("a", 2, 1, devices=(1, 3)),)}, "cannot choose devices (1, 3) of host `a`"),
        ("slurm", {"hosts": ()}, "has slots 0"),
    ],
)
def test_hosts_that_a_file_cannot_say(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        render_file(kind, replace(ORDER, job=replace(ORDER.job, **change)))
    assert message in caught.value.message


@pytest.mark.parametrize("name", ["R1", "1r", "r_1", "r-", "r" * 60, "", "r1\n"])
def test_names_that_kubernetes_refuses(name: str) -> None:
    with pytest.raises(LaunchError, match="cannot name a Kubernetes job"):
        render_file("k8s", replace(ORDER, name=name))


@pytest.mark.parametrize("name", ["$(touch x)", "a\ntouch x", "a\n", "a b", 'a"; touch x; "', "`x`", "%j", "", "é"])
def test_names_that_a_script_would_run_are_refused(name: str) -> None:
    with pytest.raises(LaunchError, match=r"--name .* has characters that are not letters"):
        render_file("slurm", replace(ORDER, name=name))
    assert "--job-name=Run_1.a-b\n" in render_file("slurm", replace(ORDER, name="Run_1.a-b"))


@pytest.mark.parametrize("time", ["3h", "24:00:00\n"])
def test_a_time_that_is_none(time: str) -> None:
    with pytest.raises(LaunchError, match=r"--time .* is not of the form"):
        render_file("slurm", replace(ORDER, time=time))


def test_container_file() -> None:
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed")
    text = render_file("docker", ORDER)
    assert text == container_file()
    parser = parse.DockerfileParser(fileobj=io.BytesIO(text.encode()))
    steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
    assert steps[0][0] == "FROM"
    assert {kind for kind, _ in steps} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert parser.baseimage.startswith("nvidia/cuda:")
    copied = [source for kind, value in steps if kind == "COPY" for source in value.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extras,) = re.findall(r'-e "\.\[([^]]*)\]"', text)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert "cluster/launch/Dockerfile.train" in project["tool"]["setuptools"]["package-data"]["ds_finetune"]


def test_the_shells_of_the_container_file(tmp_path: Path) -> None:
    """Each RUN as a script of its own."""
    joined = container_file().replace("\\\n", " ")
    _check("#!/bin/sh\nset -e\n" + "\n".join(re.findall(r"^RUN (.*)$", joined, re.MULTILINE)) + "\n", tmp_path)
