"""Commands of mpirun and srun that start the ranks of a run, and the output of `launch --dry-run`."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ds_finetune.cluster.hosts import PROGRAM
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.config.units import spans_text
from ds_finetune.errors import LaunchError
from ds_finetune.system.processes import python_module
from ds_finetune.system.rank_files import RUN_ID
from ds_finetune.system.world import slurm_nodes

ENTRY = ("-m", "ds_finetune.cluster.worker")
"""Arguments of Python for every rank. The run file and its overrides follow them."""
_NEEDED_TO_START = re.compile(
    r"(?:HOME|USER|LOGNAME|SHELL|LANG|TERM|TMPDIR|KRB5CCNAME|SSH_AUTH_SOCK|PATH|LD_LIBRARY_PATH|OMPI_MCA_\w+)$"
)
"""Environment variables that ssh, mpirun and srun need themselves. OMPI_MCA_* are the user's settings of Open MPI."""
_SLURM_VARIABLE = re.compile(r"(?:SLURM|SRUN|SLURMD)_\w+$")
_KEEPALIVE_SETTINGS = {"oob_tcp_keepalive_time": "5", "oob_tcp_keepalive_intvl": "5", "oob_tcp_keepalive_probes": "2"}
"""Settings with which Open MPI notices a silent host after 15 s, instead of after eight minutes (measured)."""


@dataclass(frozen=True)
class Job:
    """A run to start: its run file, hosts and environment variables, for the command of any launcher."""

    run: str
    """Path of the run file on every host."""
    overrides: tuple[str, ...]
    hosts: tuple[Host, ...]
    """Hosts in the order of their ranks; empty for all hosts of Slurm's allocation."""
    run_id: str
    master_addr: str = ""
    """Address of rank 0, which runs on the first host. Empty if rank 0 runs on the first node of Slurm's list."""
    master_port: int = 0
    """Port at which rank 0 listens. With 0 the port is computed from Slurm's job number."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that every rank gets. environment.py collects them."""
    directory: str = "."
    """Working directory on every host."""
    python: str = sys.executable
    entry: tuple[str, ...] = ENTRY

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 where Slurm chooses the hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def rank_command(self) -> list[str]:
        """The command that starts each rank."""
        return [self.python, "-u", *self.entry, self.run, *self.overrides]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every rank: those of `variables`, the run id, and the address of rank 0."""
        meeting = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port or "")}
        given = {name: value for name, value in meeting.items() if value}
        return dict(sorted({**self.variables, RUN_ID: self.run_id, **given}.items()))

    @property
    def names(self) -> list[str]:
        """The name of the host of each rank, in the order of the ranks."""
        return [host.name for host in self.hosts for _ in range(host.slots)]


def mpirun_command(job: Job, ssh_args: Sequence[str] = ()) -> list[str]:
    """The `mpirun` command (Open MPI 4.1) that starts the ranks of `job` in the environment `starting_environment`.

    Each host is named once per rank and mapped by `seq`. With `--host a:8,b:8` mpirun would put its own host first, and
    rank 0 would not be at MASTER_ADDR. Environment variables are passed by `-x NAME`, so that no command line shows
    their values. mpirun's own daemons (oob) use the network interface of gloo. LaunchError if a line of the hostfile
    cannot be expressed in options of Open MPI.
    """
    _check_whole_hosts(job, "mpirun", "write User and Port into a file for ssh (--ssh-args '-F FILE'), name no devices")
    if address := next((host.name for host in job.hosts if ":" in host.name), ""):
        raise LaunchError(
            f"mpirun would read the IPv6 address `{address}` of the hostfile as a host with slots",
            hint="write a host name instead of the address, or use --launcher torchrun",
        )
    if any(re.search(r"\s", word) for word in ssh_args):
        raise LaunchError(
            f"mpirun splits the ssh arguments `{shlex.join(ssh_args)}` at blanks, even at quoted ones",
            hint="write the options into a file FILE for ssh, and pass `--ssh-args '-F FILE'`",
        )
    settings = {"plm_rsh_agent": " ".join(["ssh", *ssh_args]), "plm_rsh_no_tree_spawn": "1", **_KEEPALIVE_SETTINGS}
    interface = job.variables.get("GLOO_SOCKET_IFNAME")
    settings |= {"oob_tcp_if_include": interface} if interface else {}
    chosen = [word for name, value in settings.items() for word in ("--mca", name, value)]
    names = [word for name in job.environment for word in ("-x", name)]
    # By default Open MPI binds a rank to one core or socket, but the threads of torch need all cores.
    fixed = ["--allow-run-as-root", "-np", str(job.world_size), "--host", ",".join(job.names)]
    fixed += ["--map-by", "seq", "--bind-to", "none"]
    return ["mpirun", *fixed, *chosen, "--wdir", job.directory, *names, *job.rank_command]


def srun_command(job: Job, environ: Mapping[str, str]) -> list[str]:
    """The `srun` command that starts the ranks of `job` in an allocation of Slurm, in the environment
    `starting_environment`. `environ` has the environment variables of the allocation.

    If `job` names no hosts, the ranks are the tasks of the allocation in Slurm's order. Otherwise each host is named
    once per rank under the distribution `arbitrary`, which preserves the order of the hosts (tried with Slurm 22.05;
    `--nodelist` alone sorts them). If one rank fails, srun ends all ranks. LaunchError outside an allocation, and for
    hosts that are not in it.
    """
    if "SLURM_JOB_ID" not in environ:
        raise LaunchError(
            "--launcher slurm works only in an allocation of Slurm, but SLURM_JOB_ID is not one of the "
            f"{len(environ)} environment variables",
            hint="run this command under salloc, or in a script for sbatch (docs/how-to/several-machines.md)",
        )
    _check_whole_hosts(job, "slurm", "remove them from the hostfile")
    placement = ["--distribution=block"]
    if job.hosts:
        nodes = slurm_nodes(environ, "SLURM_JOB_NODELIST")
        if other := next((host.name for host in job.hosts if host.name not in nodes), ""):
            raise LaunchError(
                f"host `{other}` is not one of the {len(nodes)} nodes of the Slurm allocation: {', '.join(nodes[:8])}",
                hint="write Slurm's node names into the hostfile, or leave --hostfile out to use all nodes",
            )
        placement = [f"--ntasks={job.world_size}", f"--nodelist={','.join(job.names)}", "--distribution=arbitrary"]
    # srun (since 22.05) does not inherit --cpus-per-task from the job, and may then bind a rank to one core.
    cpus = [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"] if "SLURM_CPUS_PER_TASK" in environ else []
    # Without `--overlap` this step would wait forever for the cores of a shell that `srun --pty` has started.
    fixed = ["--kill-on-bad-exit=1", "--overlap", "--unbuffered", "--mpi=none"]
    # `srun --export` passes only named variables, Slurm's own and TMPDIR (tried with Slurm 22.05).
    names = dict.fromkeys(["HOME", "USER", "LOGNAME", *job.environment])
    fixed += [f"--chdir={job.directory}", f"--export={','.join(names)}"]
    return ["srun", *placement, *cpus, *fixed, *job.rank_command]


def starting_environment(job: Job, environ: Mapping[str, str], *, slurm: bool = False) -> dict[str, str]:
    """The environment variables of the `mpirun` or `srun` process: those of `job.environment`, and those of `environ`
    that the process itself needs.

    mpirun passes all its variables to ranks on its own host, not only those that `-x` names (tried with Open MPI 4.1),
    so it gets few variables. Slurm's are left out, because mpirun would then start its daemons by srun.
    """
    needed = {
        name: value
        for name, value in environ.items()
        if _NEEDED_TO_START.match(name) or (slurm and _SLURM_VARIABLE.match(name))
    }
    return needed | job.environment


def _check_whole_hosts(job: Job, launcher: str, hint: str) -> None:
    for host in job.hosts:
        if host.user or host.port or host.devices:
            raise LaunchError(
                f"--launcher {launcher} has no options for user, port or devices in line {host.line} of the hostfile: "
                f"`{host.target}`, port {host.port}, devices {','.join(map(str, host.devices)) or 'all'}",
                hint=f"{hint}, or use --launcher torchrun",
            )


def dry_run_lines(job: Job, launcher: str, *, environ: Mapping[str, str], remote: Remote) -> list[str]:
    """Lines that `launch --dry-run` prints: a table of the ranks and devices of each host, and the command of mpirun
    or srun; with torchrun the command that starts the agent on each host (without the secret word that follows the run
    id), and that of each rank. `environ` has the environment variables of Slurm's allocation.
    """
    agent = python_module(PROGRAM, job.run_id, python=remote.python)
    commands = {
        "torchrun": lambda: [*(remote.command(host, agent) for host in job.hosts), job.rank_command],
        "mpirun": lambda: [mpirun_command(job, remote.ssh_args)],
        "slurm": lambda: [srun_command(job, environ)],
    }
    lines = [f"run {job.run_id}: {job.world_size or 'all'} ranks on {len(job.hosts) or 'all'} hosts by {launcher}"]
    rows = []
    for host, end in zip(job.hosts, accumulate(host.slots for host in job.hosts), strict=True):
        ranks, devices = range(end - host.slots, end), host.devices or range(host.slots)
        rows.append((host.target, spans_text(ranks), spans_text(devices)))
    lines += table(("host", "ranks", "devices"), rows) if rows else []
    return [*lines, *map(shlex.join, commands[launcher]())]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format `rows` as the lines of a table with the column heads `heads`."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (heads, *rows)]
