"""Finds the rank of this process from the environment of its launcher, and settings of `accelerate launch`."""

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

from ds_finetune.config.hostfile import read_hostfile
from ds_finetune.errors import LaunchError

_STANDARD = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_OTHER_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")
"""Variables in which unsupported launchers set the number of ranks: MPICH (Intel MPI, PALS), MVAPICH, Flux, jsrun."""
_PARTS_OF_OTHERS = ("MPI_LOCALNRANKS", "NPROC_PER_NODE", "NNODES")
"""Variables for a host's number of ranks, or for hosts, of other launchers (the last two: ms-swift, LLaMA-Factory)."""
_OTHER_RANKS = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK", "MPI_LOCALRANKID")
"""Environment variables with a rank. An unsupported launcher may set one without a number of ranks."""
_NODE_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
"""Environment variables that only torchrun (also in accelerate) and DeepSpeed 0.19.8 (launcher/launch.py:181) set. A
scheduler may start one of these launchers on each host.
"""
_STEPS_WITHOUT_RANKS = (0xFFFFFFFA, 0xFFFFFFFB, 0xFFFFFFFC)
"""Slurm's step ids (slurm.h) of a shell, a batch script and an adopted process, each of which is a single process."""
_ANY_PORT = 0
"""Port 0, for which the system selects a free one: a single process needs no port that others know."""
DEFAULT_PORT = 29_500
"""Default rendezvous port on the first host, as in torch, if neither an option nor MASTER_PORT names one."""
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Range of ports for jobs, all below 32768: Linux uses 32768 and above for outgoing connections."""
_NODES = r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
"""Regular expression of an entry in a list of nodes, such as `node[01-03,7]-ib`."""


@dataclass(frozen=True)
class World:
    """Rank of this process, sizes of the run, and the address and port at which rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"rank {self.rank} is not below world size {self.world_size} (from {self.launcher})",
                hint="start every rank with the same launcher",
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise LaunchError(
                f"local rank {self.local_rank} of {self.local_world_size} does not fit rank {self.rank} of "
                f"{self.world_size} (from {self.launcher})",
                hint="unset RANK, WORLD_SIZE and LOCAL_RANK left from another launch",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the environment variables of torchrun, DeepSpeed, accelerate, Open MPI or Slurm. Without any, the world
        is one process.

        LaunchError where only some are set, or where RANK, WORLD_SIZE or LOCAL_RANK contradict the scheduler that
        started this process.
        """
        given = [name for name in _STANDARD if name in environ]
        complete = len(given) == len(_STANDARD)
        scheduler = _scheduler(environ)
        if scheduler and given and not any(name in environ for name in _NODE_LAUNCHERS):
            _check_leftover_variables(environ, scheduler, given[:2] if complete else given)
        if not scheduler and not any(name in environ for name in _NODE_LAUNCHERS):
            _check_other_mpi(environ, environ["WORLD_SIZE"] if complete else "1")
        if complete:
            return cls._standard(environ)
        if scheduler:
            return cls._open_mpi(environ) if scheduler == _OPEN_MPI else cls._slurm(environ)
        if given:
            absent = [name for name in _STANDARD if name not in environ]
            raise LaunchError(
                f"{given[0]} is {environ[given[0]]} but {', '.join(absent)} is not set",
                hint="set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1 where each host or pod has one process, or start them "
                "by torchrun"
                if absent == ["LOCAL_RANK"]
                else f"unset {', '.join(given)}, or start with a launcher",
            )
        master_port(environ, _ANY_PORT)
        return cls(0, 1, 0, 1, "python", master_port=_ANY_PORT)

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        """Set the standard environment variables that are missing, without which DeepSpeed would need mpi4py."""
        for name, value in vars(self).items():
            if name != "launcher":
                environ.setdefault(name.upper(), str(value))

    @classmethod
    def _standard(cls, environ: Mapping[str, str]) -> Self:
        rank, size, local = (_number(environ, name) for name in _STANDARD)
        sizes = (name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ)
        local_size = _number(environ, next(sizes, ""), default=size)
        if local_size < size and "MASTER_ADDR" not in environ:
            raise LaunchError(
                f"WORLD_SIZE is {size} with {local_size} ranks on this host, and MASTER_ADDR is not set",
                hint="set MASTER_ADDR and MASTER_PORT to the host of rank 0, the same on every rank",
            )
        marks = {"ACCELERATE_MIXED_PRECISION": "accelerate", "TORCHELASTIC_RUN_ID": "torchrun"}
        launcher = next((name for mark, name in marks.items() if mark in environ), "deepspeed")
        return cls(rank, size, local, local_size, launcher, *_master_address(environ, ""))

    @classmethod
    def _open_mpi(cls, environ: Mapping[str, str]) -> Self:
        rank, size, local, local_size = (_number(environ, name) for name in _OPEN_MPI)
        if local_size < size and "MASTER_ADDR" not in environ:
            raise LaunchError(
                f"Open MPI runs {size} ranks on several hosts ({local_size} here) and MASTER_ADDR is not set",
                hint=f"start with mpirun -x MASTER_ADDR=FIRST_HOST -x MASTER_PORT={DEFAULT_PORT} ...",
            )
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "0"
        return cls(rank, size, local, local_size, "mpirun", *_master_address(environ, job))

    @classmethod
    def _slurm(cls, environ: Mapping[str, str]) -> Self:
        rank, size, local = (_number(environ, name) for name in _slurm_names(environ))
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(size)))
        per_node = list[int]()
        for part in tasks.split(","):
            numbers = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
            if not numbers:
                raise LaunchError(
                    f"Slurm's tasks per node `{tasks}` cannot be read at `{part}`", hint="start with srun"
                )
            per_node += [int(numbers[1])] * int(numbers[2] or 1)
        node = _number(environ, "SLURM_NODEID", default=0)
        if node >= len(per_node):
            raise LaunchError(
                f"SLURM_NODEID is {node} but tasks per node `{tasks}` describe {len(per_node)} nodes",
                hint="start with srun",
            )
        address, port = _master_address(environ, f"{environ.get('SLURM_JOB_ID', '0')}.{environ['SLURM_STEP_ID']}")
        if "MASTER_ADDR" not in environ and len(per_node) > 1:
            address = slurm_nodes(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST")[0]
        return cls(rank, size, local, per_node[node], "srun", address, port)


@dataclass(frozen=True)
class AccelerateChoices:
    """Settings that `accelerate launch` with DeepSpeed has put into the environment; None for a missing one."""

    config_file: str | None
    zero_stage: int | None
    offload_optimizer: str | None
    offload_param: str | None
    gradient_accumulation_steps: int | None
    gradient_clipping: float | None
    mixed_precision: str | None


def accelerate_choices(environ: Mapping[str, str]) -> AccelerateChoices | None:
    """Settings of `accelerate launch`; None if it was not used, or not with DeepSpeed."""
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None

    def value_of(name: str, kind: Callable[[str], Any] = str) -> Any:  # noqa: ANN401 - what `kind` makes
        value = environ.get(f"ACCELERATE_{name}", "auto")
        return None if value.lower() in ("auto", "none", "") else kind(value)

    file, precision = value_of("DEEPSPEED_CONFIG_FILE"), value_of("MIXED_PRECISION")
    return AccelerateChoices(
        config_file=file,
        zero_stage=None if file else value_of("DEEPSPEED_ZERO_STAGE", int),
        offload_optimizer=value_of("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        offload_param=value_of("DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        gradient_accumulation_steps=value_of("GRADIENT_ACCUMULATION_STEPS", int),
        gradient_clipping=value_of("GRADIENT_CLIPPING", float),
        mixed_precision=None if precision == "no" else precision,
    )


def check_deepspeed_hostfile() -> None:
    """Raise LaunchError where a parent `deepspeed` process was given a `--hostfile` that does not exist or is invalid.

    DeepSpeed 0.19.8 then starts ranks on this machine only (launcher/runner.py, fetch_hostfile). Ranks are not
    told, so this function reads the command lines of the parent processes.
    """
    # The import takes 15 ms, and commands without ranks do not need psutil.
    import psutil

    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            line = process.cmdline()
            if any(Path(word).name == "deepspeed" for word in line[:2]):
                _check_hostfile_arguments(line)


def _check_hostfile_arguments(line: list[str]) -> None:
    for word, value in zip(line, [*line[1:], ""], strict=True):
        name = (
            word.partition("=")[2]
            if word.startswith("--hostfile=")
            else value
            if word in ("--hostfile", "-H")
            else None
        )
        if name and not Path(name).is_file():
            raise LaunchError(
                f"`deepspeed` was given hostfile `{name}`, which does not exist, and started only on this machine",
                hint="create the hostfile, or leave --hostfile out",
            )
        if name:
            read_hostfile(name)


def _scheduler(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    if _OPEN_MPI[0] in environ:
        return _OPEN_MPI
    if (
        "SLURM_STEP_ID" in environ
        and "SLURM_PROCID" in environ
        and _number(environ, "SLURM_STEP_ID") not in _STEPS_WITHOUT_RANKS
    ):
        return _slurm_names(environ)
    return None


def _slurm_names(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Names of Slurm's environment variables for rank, size and local rank. SLURM_NTASKS may count the tasks of the
    whole allocation, so the step's own variable comes first.
    """
    return (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS",
        "SLURM_LOCALID",
    )


def _check_leftover_variables(environ: Mapping[str, str], scheduler: tuple[str, ...], given: Sequence[str]) -> None:
    """Raise LaunchError if variables `given`, such as RANK, were left from another launch and contradict the scheduler.

    With RANK 0 and WORLD_SIZE 1 left in the shell, every rank would start a run of its own in the same folder.
    """
    for name in given:
        theirs = scheduler[_STANDARD.index(name)]
        if _number(environ, name) != _number(environ, theirs):
            raise LaunchError(
                f"{name} is {environ[name]} but {theirs} is {environ[theirs]}",
                hint=f"unset {', '.join(given)}, left from another launch",
            )


def _check_other_mpi(environ: Mapping[str, str], world_size: str) -> None:
    sizes = _OTHER_SIZES + _PARTS_OF_OTHERS * (world_size == "1")
    wrong = [name for name in sizes if environ.get(name, "1") not in ("1", world_size)]
    wrong += [name for name in _OTHER_RANKS if world_size == "1" and environ.get(name, "0") != "0"]
    if wrong:
        raise LaunchError(
            f"{wrong[0]} is {environ[wrong[0]]} but the world size is {world_size}: the launcher that sets it is not "
            "supported",
            hint="start with Open MPI's mpirun, srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank",
        )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text):
        raise LaunchError(f"{name} is {text!r}, not a number", hint="start every rank with the same launcher")
    return int(text)


def _master_address(environ: Mapping[str, str], job: str) -> tuple[str, int]:
    """Address and port of rank 0. Without MASTER_PORT, the job id gives the port, so that jobs rarely share one."""
    port = _FIRST_PORT + sum(ord(c) * 31**i for i, c in enumerate(job)) % _PORTS if job else DEFAULT_PORT
    return environ.get("MASTER_ADDR", "127.0.0.1"), master_port(environ, port)


def master_port(environ: Mapping[str, str], default: int) -> int:
    """Read the port from MASTER_PORT, or return `default` if it is not set; LaunchError if it is not a port."""
    text = environ.get("MASTER_PORT")
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) >= 2**16:
        raise LaunchError(
            f"MASTER_PORT is {text!r}, not a port from 0 to 65535",
            hint="unset MASTER_PORT, or set it to a port (in a pod beside a service `master`, Kubernetes sets it)",
        )
    return int(text)


def slurm_nodes(environ: Mapping[str, str], *names: str) -> list[str]:
    """Names of the nodes in the first variable of `names` that is set, expanded as by `scontrol show hostnames`."""
    name = next((name for name in names if name in environ), names[0])
    text = environ.get(name, "")
    if not re.fullmatch(rf"{_NODES}(?:,{_NODES})*", text):
        raise LaunchError(
            f"{name} `{text}` is not a list of nodes",
            hint="start under salloc or sbatch, or set MASTER_ADDR and MASTER_PORT of rank 0 for every rank",
        )
    return [name for part in re.findall(_NODES, text) for name in _expand(part)]


def _expand(part: str) -> list[str]:
    """Nodes of an entry: `node[01-03,7]-ib` is node01-ib, node02-ib, node03-ib, node7-ib. Brackets are combined."""
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(text: str) -> list[str]:
    numbers = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
