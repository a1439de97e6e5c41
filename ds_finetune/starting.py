"""The command that starts a run on many hosts: `launch`."""

import argparse
import os
from pathlib import Path

from ds_finetune.config import read_config
from ds_finetune.console import show_line
from ds_finetune.errors import LaunchError
from ds_finetune.hostfile import Host, chosen_hosts, read_hostfile


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `launch` to the program's commands."""
    launch = commands.add_parser("launch", help="fine-tune on the hosts of a hostfile, and mind them", allow_abbrev=False)
    launch.add_argument("run", metavar="RUN.yaml")
    launch.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file")
    add_host_options(launch)
    launch.add_argument("--launcher", choices=("torchrun", "deepspeed"), default="torchrun", help="what starts ranks on a host (default torchrun)")
    launch.add_argument("--nproc", type=int, help="ranks on this machine alone, where there is no hostfile")
    launch.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="one more environment variable for every rank")
    launch.add_argument("--port", type=int, default=0, help="port of the first host at which ranks meet (default: a free one)")
    launch.add_argument("--dry-run", action="store_true", help="show ranks, environment and commands; ask no host anything")
    launch.set_defaults(command=_launch)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which hosts, and how they are reached."""
    parser.add_argument("--hostfile", help="hosts and slots, a line each: `worker-1 slots=8`")
    parser.add_argument("--include", default="", metavar="HOSTS", help="use these alone: worker-1@worker-2:0,2")
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="use all but these, in the same form")
    parser.add_argument("--ssh-args", default="", help="further arguments of ssh (default: those of DS_FINETUNE_SSH_ARGS)")


def hosts_of(arguments: argparse.Namespace, *, nproc: int | None = None) -> tuple[Host, ...]:
    """The hosts that the options choose; without a hostfile this machine, with `nproc` ranks."""
    if arguments.hostfile:
        if nproc is not None:
            raise LaunchError(f"--nproc {nproc} and --hostfile {arguments.hostfile} are both given", hint="slots are the hostfile's")
        return chosen_hosts(read_hostfile(arguments.hostfile), include=arguments.include, exclude=arguments.exclude)
    if arguments.include or arguments.exclude:
        raise LaunchError(f"{arguments.include or arguments.exclude} is chosen from no hostfile", hint="give --hostfile as well")
    if nproc is None or nproc < 1:
        raise LaunchError(f"neither --hostfile nor --nproc says where to start ranks (--nproc is {nproc})", hint="give one of them")
    return (Host("localhost", nproc, 0),)


def _launch(arguments: argparse.Namespace) -> None:
    config = read_config(arguments.run, arguments.overrides)
    from ds_finetune.launch.agents import AGENTS
    from ds_finetune.launch.environment import carried, environment_files
    from ds_finetune.launch.remote import Remote
    from ds_finetune.launch.run import Launch, launch, shown

    files = environment_files(os.environ, home=Path.home(), directory=Path.cwd())
    environment = carried(os.environ, arguments.env, files)
    wanted = Launch(
        hosts_of(arguments, nproc=arguments.nproc),
        AGENTS[arguments.launcher],
        (arguments.run, *arguments.overrides),
        environment.values,
        Remote.from_environment(arguments.ssh_args),
        arguments.port,
    )
    for line in environment.lines():
        show_line(line)
    if arguments.dry_run:
        for line in shown(config, wanted):
            show_line(line)
        return
    code = launch(config, wanted, show_line)
    if code:
        raise SystemExit(code)
