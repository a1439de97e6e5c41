"""`ds-finetune launch`: starts a run on many hosts."""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ds_finetune.cli.arguments import Arguments, Commands, add_command, add_overrides, port
from ds_finetune.cli.doctor import add_host_options, hosts_of, remote_of
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.console.phase_line import Say
from ds_finetune.console.tables import show_line
from ds_finetune.errors import LaunchError
from ds_finetune.system.world import DEFAULT_PORT

if TYPE_CHECKING:
    from ds_finetune.cluster.launch.commands import Job
    from ds_finetune.cluster.launch.remote import Remote

_LAUNCHERS = ("torchrun", "mpirun", "slurm")


def add_commands(commands: Commands) -> None:
    """Add the command `launch` to the program."""
    text = "fine-tune on the hosts of a hostfile, and restart the ranks where one fails"
    launch = add_command(commands, "launch", text, _launch)
    launch.add_argument("run", metavar="RUN.yaml")
    add_overrides(launch)
    add_host_options(launch)
    text = "program that starts the ranks (default torchrun: torch's agent, over ssh)"
    launch.add_argument("--launcher", choices=_LAUNCHERS, default="torchrun", help=text)
    launch.add_argument("--nproc", type=int, help="number of ranks on this machine, instead of a hostfile")
    text = "set one more environment variable for every rank"
    launch.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    text = "port of the first host at which ranks meet (default: a free one)"
    launch.add_argument("--port", type=port, default=0, help=text)
    text = "print ranks, environment and commands, and contact no host"
    launch.add_argument("--dry-run", action="store_true", help=text)


def _hosts(arguments: Arguments, nproc: int | None) -> tuple[Host, ...]:
    if arguments.hostfile:
        if nproc is not None:
            raise LaunchError(
                f"--nproc {nproc} cannot be combined with --hostfile {arguments.hostfile}",
                hint="leave --nproc out: the slots in the hostfile are the numbers of ranks",
            )
        return hosts_of(arguments)
    if arguments.include or arguments.exclude:
        raise LaunchError(
            f"`{arguments.include or arguments.exclude}` selects hosts from a hostfile, but --hostfile is not given",
            hint="give --hostfile as well",
        )
    if nproc is None:
        raise LaunchError(
            f"where to start {arguments.run} is unknown: neither --hostfile nor --nproc is given",
            hint="give --nproc N for N ranks on this machine, or --hostfile HOSTS",
        )
    if nproc < 1:
        raise LaunchError(f"--nproc is {nproc}, but at least one rank must start", hint="give 1 or more")
    return (Host("localhost", nproc, 0),)


def _launch(arguments: Arguments) -> None:
    config = read_config(arguments.run, arguments.overrides)
    from ds_finetune.cluster.launch.commands import Job, dry_run_lines
    from ds_finetune.cluster.launch.environment import carried_variables, environment_files
    from ds_finetune.cluster.launch.run import check_plan
    from ds_finetune.plan.settings import RunSettings

    files = environment_files(os.environ, home=Path.home(), directory=Path.cwd())
    whole_allocation = arguments.launcher == "slurm" and not arguments.hostfile
    is_local = not (arguments.hostfile or whole_allocation)
    environment = carried_variables(os.environ, arguments.env, files, is_local=is_local)
    hosts = () if whole_allocation else _hosts(arguments, arguments.nproc)
    job = Job(
        arguments.run,
        tuple(arguments.overrides),
        hosts,
        run_id=f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        master_addr=hosts[0].name if hosts else "",
        master_port=arguments.port or DEFAULT_PORT,
        variables=environment.values,
        directory=str(Path.cwd()),
    )
    limits = config.launch
    remote = replace(
        remote_of(arguments), greeting_seconds=limits.greeting_seconds, silent_seconds=limits.silent_seconds
    )
    if arguments.dry_run:
        for line in environment.lines():
            show_line(line)
        if job.hosts:
            device = "cpu" if job.variables.get("DS_ACCELERATOR") == "cpu" else "cuda"
            check_plan(RunSettings.of(config), job.hosts, device)
        for line in dry_run_lines(job, arguments.launcher, environ=os.environ, remote=remote):
            show_line(line)
        return
    # Another thread prints the lines, so that a slow disk or a stopped pager does not delay the run. An error in that
    # thread, such as that of a closed pipe, does not end the run.
    with ThreadPoolExecutor(max_workers=1) as screen:

        def say(line: str) -> None:
            screen.submit(show_line, line)

        for line in environment.lines():
            say(line)
        code = _run(arguments, config, job, remote, say)
    if code:
        raise SystemExit(code)


def _run(arguments: Arguments, config: RunConfig, job: "Job", remote: "Remote", say: Say) -> int:
    from ds_finetune.cluster.launch.commands import mpirun_command, srun_command, starting_environment
    from ds_finetune.cluster.launch.run import LaunchRequest, launch, run_scheduler
    from ds_finetune.plan.settings import RunSettings

    if arguments.launcher == "torchrun":
        settings = RunSettings.of(config)
        return launch(LaunchRequest(job, settings, config.launch, config.output_dir, remote, arguments.port), say)
    is_slurm = arguments.launcher == "slurm"
    command = srun_command(job, os.environ) if is_slurm else mpirun_command(job, remote.ssh_args)
    return run_scheduler(command, starting_environment(job, os.environ, slurm=is_slurm), say)
