"""Commands that start the ranks of a run: those of mpirun and Slurm, and printed ones for other launchers."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ds_finetune.cluster.launch.environment import interface_variables
from ds_finetune.cluster.launch.node_launchers import ENTRY_MODULE
from ds_finetune.cluster.launch.process_tags import RUN_ID
from ds_finetune.cluster.watchdog.run_secret import VARIABLE
from ds_finetune.config.hostfile import Host
from ds_finetune.errors import LaunchError

ENTRY = ("-m", ENTRY_MODULE)
"""Python's arguments in every rank, before the run file and the overrides."""
_NEEDED_TO_START = re.compile(
    r"(?:HOME|USER|LOGNAME|SHELL|LANG|TERM|TMPDIR|KRB5CCNAME|SSH_AUTH_SOCK|PATH|LD_LIBRARY_PATH|OMPI_MCA_\w+)$"
)
"""Variables that ssh, mpirun and srun themselves need; OMPI_MCA_* are the user's settings of Open MPI."""
_SLURM_VARIABLE = re.compile(r"(?:SLURM|SRUN|SLURMD)_\w+$")
_KEEPALIVE_SETTINGS = {"oob_tcp_keepalive_time": "5", "oob_tcp_keepalive_intvl": "5", "oob_tcp_keepalive_probes": "2"}
"""Seconds, seconds and a count: mpirun and the daemon of a silent host notice the lost connection after 15 s instead
of eight minutes [ran].
"""
_LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME")
"""srun --export passes only the variables it names, Slurm's own and TMPDIR to a rank [Slurm 22.05, ran]."""


@dataclass(frozen=True)
class Job:
    """The run, hosts and variables from which the command of every launcher is made."""

    run: str
    """The run file, as the hosts see it."""
    overrides: tuple[str, ...]
    """Overrides `section.name=value` of the run file."""
    hosts: tuple[Host, ...]
    """In the order of their ranks; empty for Slurm's whole allocation."""
    run_id: str
    master_addr: str = ""
    """Address of rank 0, on the first host; empty for the first node of Slurm's list."""
    master_port: int = 0
    """Port of rank 0; 0 for one that is computed from the job's number."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that every rank gets (environment.py)."""
    interface: str = ""
    """Network interface of every host, by name."""
    directory: str = "."
    """Working directory on every host."""
    python: str = sys.executable
    entry: tuple[str, ...] = ENTRY
    secret: str = field(default="", repr=False)
    """Secret by which the ranks' watchdogs authenticate each other; it is passed only in the environment."""

    def __post_init__(self) -> None:
        """LaunchError where a variable names another interface than `interface`."""
        for name, value in interface_variables(self.interface).items():
            if self.variables.get(name, value) != value:
                raise LaunchError(
                    f"--interface {value} contradicts {name}={self.variables[name]}",
                    hint=f"leave one of them out, or unset {name}",
                )

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 where Slurm chooses the hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def rank_command(self) -> list[str]:
        """The command of every rank."""
        return [self.python, "-u", *self.entry, self.run, *self.overrides]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every rank in order: `variables`, run id, interface, secret, and the address of rank 0."""
        meeting = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port or "")}
        given = {name: value for name, value in {**meeting, VARIABLE: self.secret}.items() if value}
        return dict(
            sorted({**self.variables, **interface_variables(self.interface), RUN_ID: self.run_id, **given}.items())
        )

    @property
    def names(self) -> list[str]:
        """The host of each rank, in the order of the ranks."""
        return [host.name for host in self.hosts for _ in range(host.slots)]


def mpirun_command(job: Job, ssh_args: Sequence[str] = ()) -> list[str]:
    """Open MPI's (4.1) command for the ranks of `job`, in the order of its hosts, to run in `starting_environment`.

    Each host is named once per rank and mapped by `seq`: with `--host a:8,b:8` mpirun puts its own host first, so that
    rank 0 is not at MASTER_ADDR [ran]. Values are passed by `-x NAME`, so that no command line shows them. Ranks
    use no MPI: the interface here is that of mpirun's own daemons (oob); gloo and NCCL get theirs by variables.
    LaunchError for hosts that Open MPI has no options for.
    """
    for host in job.hosts:
        _check_host_for_mpi(host)
    bad = [word for word in ssh_args if re.search(r"\s", word)]
    if bad:
        raise LaunchError(
            f"mpirun splits the arguments of ssh at blanks, so `{bad[0]}` cannot be one",
            hint="write it into a file for `ssh -F`",
        )
    settings = {"plm_rsh_agent": " ".join(["ssh", *ssh_args]), "plm_rsh_no_tree_spawn": "1", **_KEEPALIVE_SETTINGS}
    settings |= {"oob_tcp_if_include": job.interface} if job.interface else {}
    chosen = [word for name, value in settings.items() for word in ("--mca", name, value)]
    names = [word for name in job.environment for word in ("-x", name)]
    # Open MPI binds each of two ranks to one core, and more ranks to a socket; torch's threads need all cores.
    fixed = [
        "--allow-run-as-root",
        "-np",
        str(job.world_size),
        "--host",
        ",".join(job.names),
        "--map-by",
        "seq",
        "--bind-to",
        "none",
    ]
    return ["mpirun", *fixed, *chosen, "--wdir", job.directory, *names, *job.rank_command]


def srun_command(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Slurm's command for the ranks of `job` inside an allocation. It has to run in `starting_environment`.

    `environ` has the variables of the allocation.

    Without hosts the ranks are the allocation's tasks in Slurm's order. With hosts, each is named once per
    rank under the distribution `arbitrary`, which keeps their order and number of ranks [Slurm 22.05, ran; `--nodelist`
    alone is sorted]. The first rank that fails ends all ranks. LaunchError outside an allocation, and for hosts that
    are not in it.
    """
    if "SLURM_JOB_ID" not in environ:
        raise LaunchError(
            f"--launcher slurm needs an allocation, and SLURM_JOB_ID is not among {len(environ)} variables",
            hint="run it under salloc or sbatch; `ds-finetune launch --emit slurm` writes the script",
        )
    nodes = allocated_nodes(environ)
    for host in job.hosts:
        _check_host_for_slurm(host, nodes)
    placement = (
        [f"--ntasks={job.world_size}", f"--nodelist={','.join(job.names)}", "--distribution=arbitrary"]
        if job.hosts
        else ["--distribution=block"]
    )
    # Since 22.05 srun does not take this from the job; without it each rank has one core where Slurm binds them.
    cpus = [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"] if "SLURM_CPUS_PER_TASK" in environ else []
    return [*srun_options(placement + cpus, job), *job.rank_command]


def srun_options(placement: Sequence[str], job: Job) -> list[str]:
    """`srun` with `placement` and the options that every srun command here has."""
    # `--overlap`: a shell of `srun --pty` in the allocation holds its cores, and a second step would wait forever.
    names = dict.fromkeys([*_LOGIN_VARIABLES, *job.environment])
    fixed = [
        "--kill-on-bad-exit=1",
        "--overlap",
        "--unbuffered",
        "--mpi=none",
        f"--chdir={job.directory}",
        f"--export={','.join(names)}",
    ]
    return ["srun", *placement, *fixed]


def starting_environment(job: Job, environ: Mapping[str, str], *, slurm: bool = False) -> dict[str, str]:
    """All variables of the `mpirun` or `srun` process: `job.environment`, and those of `environ` that it needs itself.

    mpirun passes its whole environment to ranks on its own host, whatever `-x` names [Open MPI 4.1, ran], so it gets
    only these. Slurm's variables are left out for mpirun, which would start its daemons by srun with them.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if _NEEDED_TO_START.match(name) or (slurm and _SLURM_VARIABLE.match(name))
    }
    return kept | job.environment


def deepspeed_command(job: Job, hostfile: str) -> list[str]:
    """The command of `deepspeed` 0.19.8 for the same ranks; it is only printed."""
    chosen = [f"{host.name}:{','.join(map(str, host.devices))}" if host.devices else host.name for host in job.hosts]
    include = ["--include", "@".join(chosen)] if any(host.devices for host in job.hosts) else []
    meeting = ["--master_addr", job.master_addr, "--master_port", str(job.master_port)]
    assert job.entry[0] == "-m"
    return [
        "deepspeed",
        "--hostfile",
        hostfile,
        *include,
        *meeting,
        "--no_local_rank",
        "--module",
        *job.entry[1:],
        job.run,
        *job.overrides,
    ]


def torchrun_commands(job: Job) -> list[list[str]]:
    """The command of `torchrun` for the same ranks on each host, in the order of the hosts; it is only printed."""
    meeting = [f"--master-addr={job.master_addr}", f"--master-port={job.master_port}"]
    started = [*meeting, *job.entry, job.run, *job.overrides]
    counts = [
        [f"--nnodes={len(job.hosts)}", f"--node-rank={index}", f"--nproc-per-node={host.slots}"]
        for index, host in enumerate(job.hosts)
    ]
    return [["torchrun", *count, *started] for count in counts]


def allocated_nodes(environ: Mapping[str, str]) -> list[str]:
    """Names of an allocation's nodes from SLURM_JOB_NODELIST, as `scontrol show hostnames` prints them."""
    text = environ.get("SLURM_JOB_NODELIST", "")
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not parts or not all(re.fullmatch(r"(?:[^\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", part) for part in parts):
        raise LaunchError(f"SLURM_JOB_NODELIST `{text}` is not a list of nodes", hint="run it under salloc or sbatch")
    return [name for part in parts for name in _expand(part)]


def _expand(part: str) -> list[str]:
    """`node[01-03,7]-ib` -> node01-ib, node02-ib, node03-ib, node7-ib; several brackets multiply."""
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(text: str) -> list[str]:
    found = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def _check_host_for_mpi(host: Host) -> None:
    if host.user or host.port:
        raise LaunchError(
            f"mpirun cannot be told to reach `{host.target}` with user `{host.user}` and port {host.port} (line "
            f"{host.line} of the hostfile)",
            hint="write User and Port into a file for ssh and name it with --ssh-args '-F FILE', or use --launcher "
            "torchrun",
        )
    if host.devices:
        raise LaunchError(
            f"mpirun cannot be told devices {','.join(map(str, host.devices))} of `{host.name}`",
            hint="use whole hosts, or --launcher torchrun",
        )
    if ":" in host.name:
        raise LaunchError(
            f"mpirun takes `{host.name}` for a host with slots",
            hint="write a name for the IPv6 address, or use --launcher torchrun",
        )


def _check_host_for_slurm(host: Host, nodes: Sequence[str]) -> None:
    if host.user or host.port or host.devices:
        raise LaunchError(
            f"Slurm starts ranks as the job's user on the job's devices, and cannot be told line {host.line} of the "
            f"hostfile for `{host.target}` "
            f"with port {host.port} and devices {host.devices}",
            hint="leave them out, or use --launcher torchrun",
        )
    if host.name not in nodes:
        raise LaunchError(
            f"host `{host.name}` is not among the {len(nodes)} nodes of the allocation: {', '.join(nodes[:8])}",
            hint="write Slurm's names of nodes, or leave --hostfile out to use all",
        )
