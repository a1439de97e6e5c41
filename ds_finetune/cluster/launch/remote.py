"""Runs commands on a host: over ssh, or directly where the host is this machine."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ds_finetune.config.hostfile import Host
from ds_finetune.system.processes import python_module, with_package

_LOGIN = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_RUNTIME_DIR"),
)
"""Environment variables that a login sets. A program that is started on this machine gets only these and PYTHONPATH,
like a program over ssh.
"""


@dataclass(frozen=True)
class Remote:
    """How to reach hosts: arguments and time limits of ssh, and paths of Python and of the working directory."""

    ssh_args: tuple[str, ...] = ()
    python: str = sys.executable
    directory: str = field(default_factory=lambda: str(Path.cwd()))
    greeting_seconds: float = 12.0
    """Seconds within which a host must answer. ssh reports a failed connection two seconds earlier."""
    silent_seconds: float = 15.0
    """Seconds without a sign of life from a host after which ssh ends the connection."""

    def command(self, host: Host, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on `host` over ssh, in the working directory and with this project importable.

        ssh asks no questions, gives up on a host that does not answer, and forwards standard input, output and error.
        """
        if is_here(host):
            return list(argv)
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": max(1, int(self.greeting_seconds) - 2),
            "ServerAliveInterval": max(1, int(self.silent_seconds / 3)),
            "ServerAliveCountMax": 3,
        }
        settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        variables = f"PYTHONPATH={with_package(os.environ).get('PYTHONPATH', '')}"
        # The program `env` sets the variables, because login shells differ in their syntax for variables.
        where = f"cd {shlex.quote(self.directory)} && exec {shlex.join(['env', variables, *argv])}"
        return [*self.ssh(host, *settings, "-T"), where]

    def ssh(self, host: Host, *options: str) -> list[str]:
        """The words of an ssh command up to the destination `host`: ssh's arguments, `options` and the port."""
        port = ["-p", str(host.port)] if host.port else []
        # The user's own arguments come first, because ssh takes the first value of an option.
        return ["ssh", *self.ssh_args, *options, *port, host.target]

    def open(self, host: Host, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a Python module of this project on `host`, with pipes to its standard input and output."""
        return self.start(host, python_module(name, *arguments, python=self.python))

    def start(self, host: Host, argv: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start the program `argv` on `host`, with pipes to its standard input, and from its output and errors."""
        # Ctrl-C at the terminal must not reach ssh, so ssh gets a session of its own. `launch` tells the hosts about
        # the signal.
        login = {name: os.environ[name] for name in (*_LOGIN, "PYTHONPATH") if name in os.environ}
        env = with_package(login) if is_here(host) else None
        command, pipe = self.command(host, argv), subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


@cache
def is_here(host: Host) -> bool:
    """Whether `host` needs no ssh: it names no user and no port, and resolves to an address of this machine."""
    if host.user or host.port:
        return False
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, socket.SOCK_STREAM) as listening, suppress(OSError):
                listening.bind(address)
                return True
    return False


def address_of(host: Host) -> str:
    """The first address that the name of `host` resolves to; empty if it does not resolve, e.g. because only ssh's
    configuration knows it.
    """
    try:
        return str(socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""
