"""`ds-finetune doctor`: checks the hosts of a run before it starts."""

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from ds_finetune.cli.arguments import Arguments, Commands, add_command, add_overrides, port
from ds_finetune.config.hostfile import Host, read_hostfile, select_hosts
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.console.tables import ERR, OUT
from ds_finetune.errors import USER_ERROR_EXIT_CODE, LaunchError
from ds_finetune.system.world import DEFAULT_PORT, master_port

if TYPE_CHECKING:
    from ds_finetune.cluster.host_checks import Check
    from ds_finetune.cluster.launch.remote import Remote
    from ds_finetune.system.world import World
    from ds_finetune.trainer.resolve import ResolvedRun

_HERE = {"working folder": "."}
_SHOWN_HOSTS = 3
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_commands(commands: Commands) -> None:
    """Add the command `doctor` to the program."""
    text = "check that the hosts are ready, with a hint for each fault"
    doctor = add_command(commands, "doctor", text, _doctor)
    text = "also check the plan, operators, disk and memory of this run"
    doctor.add_argument("run", metavar="RUN.yaml", nargs="?", help=text)
    add_overrides(doctor)
    add_host_options(doctor)
    text = f"port of the first host where ranks will meet (default: MASTER_PORT, or {DEFAULT_PORT})"
    doctor.add_argument("--port", type=port, help=text)
    doctor.add_argument("--json", action="store_true", help="print the checks as a JSON list")


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add options that select the hosts of a command and say how to reach them."""
    parser.add_argument("--hostfile", help="hosts and slots, a line each: `worker-1 slots=8`")
    text = "use only these hosts and devices, e.g. worker-1@worker-2:0,2"
    parser.add_argument("--include", default="", metavar="HOSTS", help=text)
    text = "use all but these hosts and devices, in the same form"
    parser.add_argument("--exclude", default="", metavar="HOSTS", help=text)
    text = "more arguments for ssh (default: those of DS_FINETUNE_SSH_ARGS)"
    parser.add_argument("--ssh-args", default=os.environ.get("DS_FINETUNE_SSH_ARGS", ""), help=text)


def remote_of(arguments: Arguments) -> "Remote":
    """How to reach the hosts, with the arguments of ssh split into words as by a shell."""
    from ds_finetune.cluster.launch.remote import Remote

    try:
        return Remote(tuple(shlex.split(arguments.ssh_args)))
    except ValueError as open_quote:
        raise LaunchError(
            f"the ssh arguments `{arguments.ssh_args}` cannot be split into words: {open_quote}",
            hint="close the quote, or put a backslash before it",
        ) from None


def hosts_of(arguments: Arguments) -> tuple[Host, ...]:
    """Select hosts of the file `--hostfile` by `--include` and `--exclude`."""
    return select_hosts(read_hostfile(arguments.hostfile), include=arguments.include, exclude=arguments.exclude)


def _doctor(arguments: Arguments) -> None:
    from ds_finetune.cluster.doctor.run import DoctorRequest, examine
    from ds_finetune.system.info import gpu_models

    needs = run_needs(read_config(arguments.run, arguments.overrides)) if arguments.run else {"folders": _HERE}
    if arguments.hostfile:
        hosts = hosts_of(arguments)
    else:
        is_cuda = os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
        hosts = (Host("localhost", len(gpu_models()) or 1 if is_cuda else 1, 0),)
    meeting = master_port(os.environ, DEFAULT_PORT) if arguments.port is None else arguments.port
    request = DoctorRequest(hosts, remote_of(arguments), meeting, **needs)
    checks = examine(request, say=lambda text: ERR.print(text, markup=False))
    if arguments.json:
        OUT.print(json.dumps([asdict(check) for check in checks], indent=1), markup=False)
    else:
        OUT.print(_table(checks))
    failed = sum(check.state == "fail" for check in checks)
    if failed:
        ERR.print(f"{failed} of {len(checks)} checks failed", style="red")
        raise SystemExit(USER_ERROR_EXIT_CODE)


def run_needs(config: RunConfig) -> dict[str, Any]:
    """Fields of a DoctorRequest: what a run needs from its hosts, and a function `resolve` that plans the run once the
    hosts have reported their devices.
    """

    def resolve_on(world: "World", device: str) -> "ResolvedRun":
        from ds_finetune.trainer.resolve import resolve

        return resolve(config, world=world, device=device, is_config_only=True)

    return {
        "folders": {"output_dir": config.output_dir, "data.cache_dir": config.data.cache_dir},
        # Models and data that do not exist as paths are left out: they may be ids of the Hugging Face hub.
        "files": tuple(str(path) for _, path in config.inputs() if path.exists()),
        "node_local": config.checkpoint.node_local if config.checkpoint.saves else None,
        "resolve": resolve_on,
    }


def _table(checks: "Sequence[Check]") -> Table:
    """Make a table of checks, failures last. Hosts with equal results share a row, to fit 64 hosts on a page."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for check in sorted(checks, key=lambda check: list(_STYLES).index(check.state)):
        rows.setdefault((check.state, check.name, check.found, check.hint), []).append(check.host)
    columns = (Column(head, overflow="fold") for head in ("", "check", "hosts", "found", "hint"))
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for (state, name, found, hint), hosts in rows.items():
        more = f" and {len(hosts) - _SHOWN_HOSTS} more" if len(hosts) > _SHOWN_HOSTS else ""
        cells = (name, ", ".join(hosts[:_SHOWN_HOSTS]) + more, found, hint)
        table.add_row(Text(state, _STYLES[state]), *map(Text, cells))
    return table
