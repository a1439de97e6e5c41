"""Asks a program on every host (host.py), all hosts at the same time."""

import json
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

from ds_finetune.cluster.doctor.host import REPLY
from ds_finetune.cluster.host_checks import Check, label, unreachable_check
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.errors import LaunchError

_PROGRAM = "ds_finetune.cluster.doctor.host"
_END_SECONDS = 15.0
"""How long a program may take to kill what it has started."""


Reply = tuple[dict[str, Any], float, float]
"""Results by function, then the seconds by which the host's clock is ahead of this machine's, and their error."""


class Cluster:
    """The programs on `hosts`; `lost` has the failed checks of hosts that stopped answering."""

    def __init__(self, hosts: Sequence[Host], remote: Remote) -> None:
        self.hosts, self._remote = {label(host): host for host in hosts}, remote
        self.lost: dict[str, Check] = {}
        self._pool = ThreadPoolExecutor(max_workers=len(hosts))
        try:
            open_host = partial(remote.open, name=_PROGRAM, stderr=subprocess.STDOUT)
            self._processes = {name: open_host(host) for name, host in self.hosts.items()}
        except FileNotFoundError as absent:
            hint = "install it (Debian: openssh-client)"
            raise LaunchError(f"`{absent.filename}` is not installed here", hint=hint) from None

    def ask(self, requests: Mapping[str, Mapping[str, Any]], *, seconds: float) -> dict[str, Reply]:
        """Send each host the functions to call, and return the replies by host; one without a reply in time is lost."""
        asked = [name for name in requests if name not in self.lost]
        pending = {name: self._pool.submit(_ask, self._processes[name], requests[name]) for name in asked}
        wait(pending.values(), timeout=seconds)
        late = {name for name, future in pending.items() if not future.done()}
        _end([self._processes[name] for name in late])
        replies = {}
        for name, future in pending.items():
            reply = future.result()
            if isinstance(reply, str):
                code = None if name in late else self._processes[name].wait()
                self.lost[name] = unreachable_check(name, code, reply, self._remote.python)
            else:
                replies[name] = reply
        return replies

    def close(self) -> None:
        """End the programs and all that they started."""
        _end(self._processes.values())
        self._pool.shutdown()


def _end(processes: "Iterable[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        assert process.stdin
        with suppress(OSError):
            process.stdin.close()
    until = time.monotonic() + _END_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        process.kill()
        process.wait()


def _ask(process: "subprocess.Popen[bytes]", request: Mapping[str, Any]) -> Reply | str:
    """The reply, or the output of a program that ends instead."""
    assert process.stdin
    assert process.stdout
    began, output = time.time(), b""
    with suppress(OSError):
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith(REPLY):
            ended = time.time()
            there, results = json.loads(line)["reply"]
            return results, there - (began + ended) / 2, (ended - began) / 2
        output += line
    return output.decode(errors="replace")
