"""A command on a host: by ssh, or here where the host is this machine."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

from ds_finetune.errors import LaunchError
from ds_finetune.hostfile import Host

_LOGIN = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TERM",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "XDG_RUNTIME_DIR",
)
"""What a login gives; on this machine no other variable is inherited, so that every host has the same, which are those
that are carried.
"""
SSH_ARGS = "DS_FINETUNE_SSH_ARGS"
"""Environment variable with further arguments of ssh, as a shell would split them."""
CONNECT_SECONDS = 10
_PARTING_SECONDS = 2
_SILENT_SECONDS = 5
"""Between the questions that ssh asks a silent host; it gives up after three."""


@dataclass(frozen=True)
class Remote:
    """How hosts are reached, and where on them the program is: the same path and the same Python as here."""

    ssh_args: tuple[str, ...] = ()
    python: str = sys.executable
    directory: str = "."
    connect_seconds: int = CONNECT_SECONDS
    """How long ssh tries to connect."""

    @classmethod
    def from_environment(cls, ssh_args: str = "") -> "Remote":
        """With `ssh_args`, or else those of DS_FINETUNE_SSH_ARGS, and the working directory of this process."""
        given = ssh_args or os.environ.get(SSH_ARGS, "")
        try:
            words = tuple(shlex.split(given))
        except ValueError as open_quote:
            raise LaunchError(
                f"arguments of ssh `{given}`: {open_quote}", hint="close the quotation, or escape it"
            ) from None
        return cls(words, sys.executable, str(Path.cwd()))

    def within(self, greeting_seconds: float) -> "Remote":
        """The same, with so long for a host's first word; ssh gives up a moment before, and says why."""
        return replace(self, connect_seconds=max(1, int(greeting_seconds) - _PARTING_SECONDS))

    def command(self, host: Host, argv: Sequence[str]) -> list[str]:
        """What is started here so that `argv` runs on `host`, in the working directory, with this project importable.

        ssh never asks anything, gives up on a host that does not answer, and forwards standard input, output and error.
        """
        if is_here(host):
            return list(argv)
        port = ["-p", str(host.port)] if host.port else []
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": self.connect_seconds,
            "ServerAliveInterval": _SILENT_SECONDS,
            "ServerAliveCountMax": 3,
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        variables = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
        # `env`, because not every login shell sets variables as sh does.
        where = f"cd {shlex.quote(self.directory)} && exec {shlex.join(['env', variables, *argv])}"
        # The user's own arguments come first: ssh takes the first value of an option.
        return ["ssh", *self.ssh_args, *given, "-T", *port, host.target, where]

    def module(self, host: Host, name: str, *arguments: str) -> list[str]:
        """`command` for a module of this project."""
        return self.command(host, [self.python, "-u", "-m", name, *arguments])

    def open(
        self, host: Host, name: str, *arguments: str, stderr: int | IO[bytes] = subprocess.PIPE
    ) -> "subprocess.Popen[bytes]":
        """Start a module of this project on `host` with pipes to its standard input and output."""
        # A session of its own, so that Ctrl-C at the terminal reaches this process alone, which tells the hosts in
        # order.
        env = (
            {name: os.environ[name] for name in (*_LOGIN, "PYTHONPATH") if name in os.environ}
            if is_here(host)
            else None
        )
        command, pipe = self.module(host, name, *arguments), subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=env, start_new_session=True)


@cache
def is_here(host: Host) -> bool:
    """Whether `host` is this machine, reached without ssh: its name leads to one of our own addresses, and it names no
    user or port.
    """
    if host.user or host.port:
        return False
    try:
        found = socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_ours(family, address) for family, _, _, _, address in found)


def address_of(host: Host) -> str:
    """The first address that `host`'s name leads to from here; empty where it leads to none, as with names of ssh's own
    configuration.
    """
    try:
        return str(socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    """Only a machine's own addresses can be bound to."""
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        try:
            tried.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
