"""Starts the program of host_functions.py on every host over ssh, and sends requests to all of them at once."""

import json
import re
import secrets
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from ds_finetune.cluster.host_checks import Check, clock_check, failed_checks, host_checks, label, unreachable_check
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.errors import LaunchError
from ds_finetune.system.info import HostInfo, gather_host_info, source_version

PROGRAM = "ds_finetune.cluster.host_functions"
_END_SECONDS = 15.0
"""Seconds that the program on a host may take to kill the processes that it started."""
_LACKS_MODULE = re.compile(r"(No module named|cannot import name .* from) '?ds_finetune\b")
_PRINT_VERSION = """
import ds_finetune, hashlib, pathlib
files = sorted(pathlib.Path(ds_finetune.__file__).parent.rglob("*.py"))
source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:10]
print(f"ds_finetune {ds_finetune.__version__} (source {source})")
"""
"""Python program that prints the result of `system.info.source_version`, also for a version that lacks it."""
_LINES = 200
"""Number of lines at the end of a host's output that are stored for a report."""

Reply = tuple[dict[str, Any], float, float]
"""The reply of a host: the results by function name, the seconds by which the host's clock is ahead of this machine's
clock, and the maximum error of that number.
"""
Event = Mapping[str, Any] | str
"""An event that the program on a host has sent, or a line of text that it has printed."""
OnEvent = Callable[[Event], None]


class Cluster:
    """The programs that run on `hosts`, one on each. `lost` maps each host that no longer answers to a failed check.
    `name` appears in the command line of the programs' processes.
    """

    def __init__(self, hosts: Sequence[Host], remote: Remote, *, name: str) -> None:
        self.hosts, self._remote = {label(host): host for host in hosts}, remote
        self.lost: dict[str, Check] = {}
        self._clock_checks: list[Check] = []
        self._pool = ThreadPoolExecutor(max_workers=len(hosts))
        token = f"{name}.{secrets.token_hex(8)}"
        self._mark = f"{token} [".encode()
        try:
            self._processes = {key: remote.open(host, PROGRAM, token) for key, host in self.hosts.items()}
        except FileNotFoundError as absent:
            hint = "install the OpenSSH client (Debian: openssh-client)"
            raise LaunchError(f"the program `{absent.filename}` is not installed on this machine", hint=hint) from None

    def infos(self, environ: Mapping[str, str], port: int, *, seconds: float) -> dict[str, HostInfo]:
        """Facts of the hosts that answer with this version of the program. The first host also examines `port`."""
        first, infos = next(iter(self.hosts)), {}
        queries = {name: {"facts": {"environ": environ, "port": port * (name == first)}} for name in self.hosts}
        others = []
        for name, (results, ahead, error) in self.ask(queries, seconds=seconds).items():
            self._clock_checks.append(clock_check(name, ahead, error))
            try:
                infos[name] = HostInfo(**results["facts"])
            except TypeError:
                others.append(name)
        self.lost |= zip(others, self._pool.map(self._version_check, others), strict=True)
        return infos

    def preflight(self, infos: Mapping[str, HostInfo], environ: Mapping[str, str]) -> list[tuple[Host, Check]]:
        """Check all hosts before ranks with the environment `environ` start; returns the checks that did not pass."""
        answered = {name: info for name, info in infos.items() if name not in self.lost}
        checks = host_checks(self.hosts, answered, here=gather_host_info(), environ=environ)
        return failed_checks(self.hosts, [*self._clock_checks, *self.lost.values(), *checks])

    def ask(self, requests: Mapping[str, Mapping[str, Any]], *, seconds: float) -> dict[str, Reply]:
        """Send each host its request, and return the replies by host. A host that does not reply in time is `lost`."""
        pending = {name: self.start(name, requests[name]) for name in requests if name not in self.lost}
        wait(pending.values(), timeout=seconds)
        late = {name for name, future in pending.items() if not future.done()}
        _end([self._processes[name] for name in late])
        replies = {name: future.result() for name, future in pending.items()}
        outputs = {name: reply for name, reply in replies.items() if isinstance(reply, str)}
        checks = self._pool.map(lambda name: self._unreachable(name, outputs[name], is_late=name in late), outputs)
        self.lost |= zip(outputs, checks, strict=True)
        return {name: reply for name, reply in replies.items() if not isinstance(reply, str)}

    def start(
        self, name: str, request: Mapping[str, Any], on_event: OnEvent = lambda event: None
    ) -> "Future[Reply | str]":
        """Send one host a request. The future has the reply, or the last output of a program that ends before it
        replies. Another thread passes events and other lines of output to `on_event`.
        """
        return self._pool.submit(self._ask, self._processes[name], request, on_event)

    def order(self, name: str, request: Mapping[str, Any]) -> None:
        """Send a host an order, which is a request without a reply. Nothing happens if the host is gone."""
        with suppress(OSError, ValueError):
            _send(self._processes[name], request)

    def beat(self) -> None:
        """Send a keep-alive message to every host."""
        for name in self.hosts:
            self.order(name, {})

    def end(self, name: str) -> None:
        """End the program on one host and all processes that this program started."""
        _end([self._processes[name]])

    def lose(self, name: str, output: str) -> Check:
        """Record that the program on a host has ended. Returns a failed check that quotes the last output."""
        self.lost[name] = unreachable_check(self.hosts[name], self._exit_code(name), output, self._remote)
        return self.lost[name]

    def close(self) -> list[str]:
        """End each host's program, and what it started; returns the hosts whose program did not end in time."""
        late = _end(self._processes.values())
        self._pool.shutdown()
        return [name for name, process in self._processes.items() if process in late]

    def _exit_code(self, name: str) -> int | None:
        # A program that has closed its output may still run.
        with suppress(subprocess.TimeoutExpired):
            return self._processes[name].wait(_END_SECONDS)
        return None

    def _unreachable(self, name: str, output: str, *, is_late: bool) -> Check:
        code = None if is_late else self._exit_code(name)
        if code and _LACKS_MODULE.search(output):
            return self._version_check(name)
        return unreachable_check(self.hosts[name], code, output, self._remote)

    def _version_check(self, name: str) -> Check:
        """The failed check of a host with another version of this program, which may lack the host's module."""
        process = self._remote.start(self.hosts[name], [self._remote.python, "-P", "-c", _PRINT_VERSION])
        try:
            lines = process.communicate(timeout=self._remote.greeting_seconds)[0].decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            lines = ["ds_finetune of an unknown version"]
        theirs = next((line for line in lines if line.startswith("ds_finetune ")), "no ds_finetune")
        text = f"it has {theirs}, and this machine ds_finetune {source_version()}"
        return Check("versions", name, "fail", text, "install the same source on every host")

    def _ask(self, process: "subprocess.Popen[bytes]", request: Mapping[str, Any], on_event: OnEvent) -> Reply | str:
        began, output = time.time(), deque[str](maxlen=_LINES)
        with suppress(OSError):
            _send(process, request)
        assert process.stdout
        for line in process.stdout:
            text, mark, body = line.partition(self._mark)
            if text:
                output.append(text.decode(errors="replace").rstrip("\n"))
                on_event(output[-1])
            if not mark:
                continue
            kind, value = json.loads(b"[" + body)
            if kind == "reply":
                ended, (there, results) = time.time(), value
                return results, there - (began + ended) / 2, (ended - began) / 2
            on_event(value)
        return "\n".join(output)


def _send(process: "subprocess.Popen[bytes]", request: Mapping[str, Any]) -> None:
    assert process.stdin
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()


def _end(processes: "Iterable[subprocess.Popen[bytes]]") -> "list[subprocess.Popen[bytes]]":
    """End programs by closing their standard input; returns the programs that had to be killed."""
    late = []
    for process in processes:
        assert process.stdin
        with suppress(OSError):
            process.stdin.close()
    until = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(process)
        process.kill()
        process.wait()
    return late
