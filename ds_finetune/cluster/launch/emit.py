"""Writes files for services that start the ranks: an sbatch script, Kubernetes manifests, and the container file."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import yaml

from ds_finetune.cluster.launch.commands import Job, srun_options
from ds_finetune.cluster.launch.environment import may_show, redacted
from ds_finetune.cluster.launch.rank_logs import RUN_ID
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, LaunchError
from ds_finetune.system.world import DEFAULT_PORT

SAVE_SECONDS = 300
"""Seconds between the signal on which a run saves and the time limit of the job."""
_POD_SAVE_SECONDS = 120
"""Seconds between the signal on which a pod's ranks save and the kill of these ranks.

torchrun also waits this long for ranks that hang after another rank has failed.
"""
_POD_LEAVE_SECONDS = 30
_CONTAINER_ENTRY = ("-m", "ds_finetune", "train")
"""Arguments of python in a pod: `train` and not `ds_finetune.cluster.worker`, so that `kubectl logs` prints all ranks.
"""
_CONTAINER_RUNS = "/workspace/runs"
"""The folder `runs` of the container's working directory (Dockerfile.train)."""
_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_LABEL_CHARACTERS = 50
"""A Kubernetes label has at most 63 characters, and a pod's label is the job's name and a number."""
_TIME = re.compile(r"(?:\d+-)?\d{1,2}:\d{2}:\d{2}", re.ASCII)
_JOB_NAME = re.compile(r"[A-Za-z0-9._-]+")
"""Characters without a special meaning in bash, `#SBATCH` lines and Slurm's file name patterns."""


@dataclass(frozen=True, kw_only=True)
class EmitRequest:
    """The inputs of an emitted file."""

    job: Job
    """Run file, overrides, hosts (only their number and slots are used) and variables."""
    name: str
    """Name of the job: letters, digits, `-`, `_` and `.`; for Kubernetes lower-case letters, digits and `-`."""
    named: frozenset[str] = field(default_factory=frozenset)
    """Variables that the user named with --env; they are written even if they are paths of this machine."""
    time: str = "24:00:00"
    """Time limit, `[D-]HH:MM:SS`."""
    cpus: int = 8
    """Cores of each rank."""
    image: str = "ds-finetune:latest"
    """Container image, built from what `--emit docker` writes."""
    claim: str = "runs"
    """Kubernetes volume claim that is mounted as the folder `runs`; all pods have to be able to write it."""

    @property
    def on_gpus(self) -> bool:
        """Whether the job requests GPUs: always, except where DS_ACCELERATOR is cpu."""
        return self.job.variables.get("DS_ACCELERATOR") != "cpu"


def render_file(kind: str, request: EmitRequest) -> str:
    """The text of a file of `kind` (slurm, k8s, docker); LaunchError for hosts or names that it does not support."""
    # Secret overrides are refused: the file and every rank's command line would show them.
    pairs = zip(request.job.overrides, redacted(request.job.overrides), strict=True)
    secret = [hidden for override, hidden in pairs if override != hidden]
    if secret:
        raise LaunchError(
            f"the override {secret[0]} looks secret, and a file that --emit writes would hold it",
            hint="write it into the run file, or set a variable that the library reads (HF_TOKEN, a netrc file, ...)",
        )
    return {"slurm": sbatch_script, "k8s": kubernetes_manifests, "docker": lambda _: container_file()}[kind](request)


def container_file() -> str:
    """The container file for training; images are built with it from the root of the repository."""
    return files("ds_finetune.cluster.launch").joinpath("Dockerfile.train").read_text()


def sbatch_script(request: EmitRequest) -> str:
    """A script for `sbatch` with a rank for each GPU, which saves `SAVE_SECONDS` before its time limit and requeues.

    srun returns the highest exit code of its tasks, and ends the others when the first one exits. Therefore the script
    itself receives and records SIGUSR1: a run that ends with an error after the signal is requeued, and one that fails
    without the signal is not. Secrets are not written: the script takes them from its submitter's environment.
    """
    nodes, slots = _equal_slots(
        request, "sbatch's --gpus-per-node", "run `ds-finetune launch --launcher slurm --hostfile HOSTS` under salloc"
    )
    if not _JOB_NAME.fullmatch(request.name):
        raise LaunchError(
            f"--name {request.name!r} has characters that are not letters, digits, `-`, `_` or `.`",
            hint="give another name: the script would run them",
        )
    if not _TIME.fullmatch(request.time):
        raise LaunchError(f"--time {request.time!r} is not a time", hint="write e.g. 24:00:00 or 2-00:00:00")
    options = {"job-name": request.name, "nodes": nodes, "ntasks-per-node": slots, "cpus-per-task": request.cpus}
    options |= {"gpus-per-node": slots} if request.on_gpus else {}
    options |= {"time": request.time, "signal": f"B:USR1@{SAVE_SECONDS}", "output": "%x-%j.log", "open-mode": "append"}
    # srun's --export lists the names of variables, so variables that the script sets must have a value here.
    job = replace(request.job, master_addr="first-node", master_port=DEFAULT_PORT, hosts=())
    placement = [
        f"--nodes={nodes}",
        f"--ntasks={nodes * slots}",
        "--distribution=block",
        f"--cpus-per-task={request.cpus}",
    ]
    return _SBATCH.format(
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in options.items()),
        directory=shlex.quote(job.directory),
        variables="\n".join(
            _exported({name: value for name, value in job.environment.items() if name not in _SET_IN_SCRIPT})
        ),
        name=request.name,
        run_id=RUN_ID,
        srun=shlex.join([*srun_options(placement, job), *job.rank_command]),
        interrupted=INTERRUPTED_EXIT_CODE,
    )


_SET_IN_SCRIPT = ("MASTER_ADDR", "MASTER_PORT", RUN_ID)
_SBATCH = """#!/usr/bin/env bash
# Written by `ds-finetune launch --emit slurm`. What your cluster wants besides is given when submitting, e.g.
#   sbatch --partition=gpu --account=me FILE
{options}
#SBATCH --requeue
set -euo pipefail
cd {directory}

# What travels to the ranks: srun --export below names it, and nothing else does.
{variables}

# Rank 0 is on the first node; the port follows from the job, so that two jobs on a node do not meet.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{nodes[0]}}" MASTER_PORT="$((20000 + SLURM_JOB_ID % 12000))"
export {run_id}="{name}-$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"

# The signal some time before the end goes on to the ranks, which save and leave with code {interrupted}.
{srun} &
step=$! asked=0 code=138
trap 'asked=1; kill -USR1 "$step"' USR1
# 138 is a wait that the signal ended, and not the run.
while [ "$code" = 138 ]; do code=0; wait "$step" || code=$?; done

if [ "$asked" = 1 ] && [ "$code" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kubernetes_manifests(request: EmitRequest) -> str:
    """An Indexed Job with a pod for each host, and the headless Service by which pods find the first one.

    Each pod runs torchrun with its completion index as node rank. The first pod that fails fails the job, and
    Kubernetes ends the others; the same command resumes from the last checkpoint. Variables that are paths of this
    machine are left out unless they are in `request.named`; secrets come from a Secret that is not written.
    """
    nodes, slots = _equal_slots(request, "a Job's pods", "write one hostfile for hosts of one kind")
    if not _LABEL.fullmatch(request.name) or len(request.name) > _LABEL_CHARACTERS:
        raise LaunchError(
            f"`{request.name}` cannot name a Kubernetes job: it has to be lower-case letters, digits and `-`, "
            f"{_LABEL_CHARACTERS} at most",
            hint="give another with --name",
        )
    # By default torchrun (torch 2.13, distributed/launcher/api.py:146) kills ranks 30 s after SIGTERM, during a large
    # save.
    given = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_POD_SAVE_SECONDS)} | request.job.environment
    given = {name: value for name, value in given.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    paths = sorted(name for name, value in given.items() if value.startswith("/") and name not in request.named)
    variables = [_variable(request, name, value) for name, value in given.items() if name not in paths]
    secret = any("valueFrom" in variable for variable in variables)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": request.name},
        # Pods resolve each other's names before they are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": request.name},
            "ports": [{"port": DEFAULT_PORT}],
        },
    }
    head = [
        "# Written by `ds-finetune launch --emit k8s`. Start: kubectl apply -f FILE; again, from the last "
        "checkpoint: kubectl replace --force -f FILE"
    ]
    head += [f"# Left out, being paths of the machine it was written on: {', '.join(paths)}"] if paths else []
    head += [f"# Secrets: kubectl create secret generic {request.name} --from-literal=NAME=VALUE"] if secret else []
    return (
        "\n".join(head)
        + "\n"
        + yaml.safe_dump_all([service, _indexed_job(request, nodes, slots, variables)], sort_keys=False, width=150)
    )


def _indexed_job(request: EmitRequest, nodes: int, slots: int, variables: list[dict[str, Any]]) -> dict[str, Any]:
    meeting = [f"--master-addr={request.name}-0.{request.name}", f"--master-port={DEFAULT_PORT}"]
    counts = [f"--nnodes={nodes}", "--node-rank=$(JOB_COMPLETION_INDEX)", f"--nproc-per-node={slots}"]
    # Kubernetes replaces `$(NAME)` in arguments, and writes `$$(` as `$(`.
    words = [word.replace("$(", "$$(") for word in (*_CONTAINER_ENTRY, request.job.run, *request.job.overrides)]
    limits = {"nvidia.com/gpu": slots} if request.on_gpus else {}
    container = {
        "name": "ranks",
        "image": request.image,
        "command": ["torchrun"],
        "args": [*counts, *meeting, *words],
        "env": variables,
        "ports": [{"containerPort": DEFAULT_PORT}],
        "resources": {"requests": {"cpu": request.cpus * slots}, **({"limits": limits} if limits else {})},
        "volumeMounts": [{"name": "runs", "mountPath": _CONTAINER_RUNS}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": request.name,
        "restartPolicy": "Never",
        # SIGTERM is the signal on which a run saves.
        "terminationGracePeriodSeconds": _POD_SAVE_SECONDS + _POD_LEAVE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": request.claim}},
            # NCCL and data loaders need more shared memory than a container's default of 64 MiB.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": request.name}, "spec": spec}


def _variable(request: EmitRequest, name: str, value: str) -> dict[str, Any]:
    if not may_show(name, value):
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": request.name, "key": name}}}
    return {"name": name, "value": value.replace("$(", "$$(")}


def _exported(variables: Mapping[str, str]) -> list[str]:
    missing = "set it where you submit: secrets, and values of names that are not on the list, are not written here"
    return [
        f"export {name}={shlex.quote(value)}" if may_show(name, value) else f'export {name}="${{{name}:?{missing}}}"'
        for name, value in variables.items()
    ]


def _equal_slots(request: EmitRequest, what: str, hint: str) -> tuple[int, int]:
    """The number of hosts and the slots of each; LaunchError where slots differ between hosts."""
    slots = {host.slots: host.name for host in request.job.hosts}
    chosen = [host for host in request.job.hosts if host.devices]
    if len(slots) != 1:
        text = " and ".join(f"{count} (`{name}`)" for count, name in slots.items())
        raise LaunchError(f"{what} must be one number, and the hosts have slots {text or '0'}", hint=hint)
    if chosen:
        raise LaunchError(
            f"{what} cannot be devices {chosen[0].devices} of `{chosen[0].name}`",
            hint="leave --include and --exclude out",
        )
    return len(request.job.hosts), next(iter(slots))
