"""`launch --emit`: an sbatch script for Slurm, manifests for Kubernetes, and a Dockerfile for training."""

import re
import shlex
from dataclasses import dataclass, field, replace
from importlib.resources import files

import jinja2
import yaml

from ds_finetune.cluster.launch.commands import Job, srun_options
from ds_finetune.cluster.launch.environment import may_show, redacted
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, LaunchError
from ds_finetune.system.rank_files import RUN_ID
from ds_finetune.system.world import DEFAULT_PORT

SAVE_SECONDS = 300
"""Seconds before the time limit of a Slurm job at which the run gets the signal to save."""
_POD_SAVE_SECONDS = 120
"""Seconds from the signal on which a pod's ranks save until these ranks are killed.

torchrun also waits this long for ranks that hang after another rank has failed. Its default (torch 2.13,
distributed/launcher/api.py:146) is 30 s, too short for a large save.
"""
_POD_LEAVE_SECONDS = 30
_CONTAINER_ENTRY = ("-m", "ds_finetune", "train")
"""Arguments of python in a pod. They start `train` instead of `ds_finetune.cluster.worker`, so that `kubectl logs`
prints the output of all ranks.
"""
_CONTAINER_RUNS = "/workspace/runs"
"""The folder of runs in a container: `runs` in the working directory that Dockerfile.train sets."""
_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_LABEL_CHARACTERS = 50
"""Maximum length of a Kubernetes job's name. A pod's label consists of the job's name and a number, and a label has at
most 63 characters.
"""
_TIME = re.compile(r"(?:\d+-)?\d{1,2}:\d{2}:\d{2}", re.ASCII)
_JOB_NAME = re.compile(r"[A-Za-z0-9._-]+")
"""Matches names of Slurm jobs: their characters have no special meaning in bash, in `#SBATCH` lines and in Slurm's file
name patterns.
"""


@dataclass(frozen=True, kw_only=True)
class EmitRequest:
    """What `launch --emit` writes into a file: the run to start, and options of the Slurm or Kubernetes job."""

    job: Job
    """The run that the emitted file starts: run file, overrides, hosts (only their number and slots are used) and
    environment variables.
    """
    name: str
    """Name of the job that the emitted file starts. It has letters, digits, `-`, `_` and `.`; for Kubernetes only
    lower-case letters, digits and `-`.
    """
    named: frozenset[str] = field(default_factory=frozenset)
    """Environment variables that the user named with --env. They are written even if they are paths of this machine."""
    time: str = "24:00:00"
    """Time limit of the Slurm job in the form `[D-]HH:MM:SS`."""
    cpus: int = 8
    """Number of CPU cores of each rank."""


def render_file(kind: str, request: EmitRequest) -> str:
    """The file that `launch --emit KIND` writes, for kind slurm, k8s or docker. LaunchError for unsupported hosts."""
    # Secret overrides are refused: the file and every rank's command line would show them.
    pairs = zip(request.job.overrides, redacted(request.job.overrides), strict=True)
    secret = [hidden for override, hidden in pairs if override != hidden]
    if secret:
        raise LaunchError(
            f"the override {secret[0]} looks like a secret, and --emit would write it into the file",
            hint="write the key into the run file, or use an environment variable of the library, such as HF_TOKEN",
        )
    return {"slurm": sbatch_script, "k8s": kubernetes_manifests, "docker": lambda _: container_file()}[kind](request)


def container_file() -> str:
    """The container file for training; images are built with it from the root of the repository."""
    return files("ds_finetune.cluster.launch").joinpath("Dockerfile.train").read_text()


def sbatch_script(request: EmitRequest) -> str:
    """A script for `sbatch` that starts a rank for each GPU. The run saves `SAVE_SECONDS` before the job's time limit,
    and the job is queued again.

    Secrets are not written: the script takes them from its submitter's environment.
    """
    nodes, slots = _equal_slots(
        request, "an sbatch script", "run `ds-finetune launch --launcher slurm --hostfile HOSTS` under salloc"
    )
    if not _JOB_NAME.fullmatch(request.name):
        raise LaunchError(
            f"--name {request.name!r} has characters that are not letters, digits, `-`, `_` or `.`",
            hint="choose another name, because bash would interpret such characters in the script",
        )
    if not _TIME.fullmatch(request.time):
        raise LaunchError(f"--time {request.time!r} is not of the form [D-]HH:MM:SS", hint="write e.g. 24:00:00")
    # `srun --export` needs the names of all variables. These placeholders stand for variables that the script itself
    # sets.
    job = replace(request.job, master_addr="first-node", master_port=DEFAULT_PORT, hosts=())
    placement = [f"--nodes={nodes}", f"--ntasks={nodes * slots}"]
    placement += ["--distribution=block", f"--cpus-per-task={request.cpus}"]
    set_in_script = ("MASTER_ADDR", "MASTER_PORT", RUN_ID)
    return _rendered(
        "job.sh.jinja",
        request,
        {name: value for name, value in job.environment.items() if name not in set_in_script},
        directory=job.directory,
        interrupted=INTERRUPTED_EXIT_CODE,
        run_id=RUN_ID,
        save_seconds=SAVE_SECONDS,
        srun=[*srun_options(placement, job), *job.rank_command],
    )


def kubernetes_manifests(request: EmitRequest) -> str:
    """An Indexed Job with a pod for each host, and the headless Service by which pods find the first one.

    Each pod runs torchrun with its completion index as node rank. If one pod fails, Kubernetes ends all pods of the
    job; a new job resumes from the last checkpoint. Environment variables that are paths of this machine are left out
    unless they are in `request.named`. Secrets are read from a Kubernetes Secret, which the user creates.
    """
    _equal_slots(request, "a Kubernetes Job", "write a hostfile of hosts with equal slots")
    if not _LABEL.fullmatch(request.name) or len(request.name) > _LABEL_CHARACTERS:
        raise LaunchError(
            f"`{request.name}` cannot name a Kubernetes job: such a name has at most {_LABEL_CHARACTERS} lower-case "
            "letters, digits and `-`, begins with a letter and does not end with `-`",
            hint="give another name with --name",
        )
    given = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_POD_SAVE_SECONDS)} | request.job.environment
    given = {name: value for name, value in given.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    paths = sorted(name for name, value in given.items() if value.startswith("/") and name not in request.named)
    return _rendered(
        "job.yaml.jinja",
        request,
        {name: value for name, value in given.items() if name not in paths},
        command=[*_CONTAINER_ENTRY, request.job.run, *request.job.overrides],
        leave_seconds=_POD_SAVE_SECONDS + _POD_LEAVE_SECONDS,
        left_out=paths,
        port=DEFAULT_PORT,
        runs=_CONTAINER_RUNS,
    )


def _rendered(template: str, request: EmitRequest, variables: dict[str, str], **values: object) -> str:
    """Fill a template of this package with the fields of `request` and other values. Environment variables whose value
    may not be shown are None in the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_finetune.cluster", "launch"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Kubernetes replaces `$(NAME)` in arguments and values, and turns `$$(` into `$(`, so `$(` is doubled.
    environment.filters |= {"shell": shlex.quote, "yaml": _yaml, "pod": lambda text: _yaml(text.replace("$(", "$$("))}
    shown = {name: value if may_show(name, value) else None for name, value in variables.items()}
    # The job requests GPUs unless DS_ACCELERATOR is cpu.
    on_gpus = request.job.variables.get("DS_ACCELERATOR") != "cpu"
    nodes, slots = len(request.job.hosts), request.job.hosts[0].slots
    return environment.get_template(template).render(
        vars(request), variables=shown, on_gpus=on_gpus, nodes=nodes, slots=slots, **values
    )


def _yaml(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', width=float("inf")).strip()


def _equal_slots(request: EmitRequest, what: str, hint: str) -> tuple[int, int]:
    slots = {host.slots: host.name for host in request.job.hosts}
    chosen = [host for host in request.job.hosts if host.devices]
    if len(slots) != 1:
        text = " and ".join(f"{count} (`{name}`)" for count, name in slots.items())
        raise LaunchError(f"{what} gives each host the same slots, but the hostfile has slots {text or '0'}", hint=hint)
    if chosen:
        raise LaunchError(
            f"{what} cannot choose devices {chosen[0].devices} of host `{chosen[0].name}`",
            hint="leave --include and --exclude out",
        )
    return len(request.job.hosts), next(iter(slots))
