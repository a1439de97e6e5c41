"""Runs a probe (cluster/doctor/probe.py) on every host, and sends requests to all probes in parallel.

A host that stops answering is reported once and gets no further requests.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from ds_finetune.cluster.doctor.messages import REPLIES, TimeReply, TimeRequest
from ds_finetune.cluster.doctor.probe import MODULE
from ds_finetune.cluster.doctor.session import HostLostError, RefusedError, Session
from ds_finetune.cluster.doctor.system_checks import ClockOffset
from ds_finetune.cluster.hosts.check_result import Check, label
from ds_finetune.cluster.hosts.unreachable import other_program_check, unreachable_check
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import LaunchError
from ds_finetune.system.process_messages import MessageError, ProcessMessage

_NOTICE_SECONDS = 15.0
_PINGS = 5
_PING_SECONDS = 10.0
Reply = TypeVar("Reply", bound=ProcessMessage)
Result = TypeVar("Result")


class Cluster:
    """Runs a probe on each host while in `with`; `lost` has the failed checks of hosts that stopped answering."""

    def __init__(self, hosts: Sequence[Host], remote: Remote, say: Say) -> None:
        self.hosts, self.remote, self.say = {label(host): host for host in hosts}, remote, say
        self.sessions: dict[str, Session] = {}
        self.lost: list[Check] = []

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(max_workers=len(self.hosts))
        try:
            for name, host in self.hosts.items():
                self.sessions[name] = self._session(host)
        except FileNotFoundError as absent:
            raise LaunchError(
                f"`{absent.filename}` is not installed here", hint="install it (Debian: openssh-client)"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not in the pool: after an interrupt all its threads may still wait for replies.
        with ThreadPoolExecutor(max_workers=len(self.hosts)) as ending:
            list(ending.map(Session.end, self.sessions.values()))
        self._pool.shutdown()

    def ask(
        self, requests: Mapping[str, ProcessMessage], reply: type[Reply], *, seconds: float, what: str = ""
    ) -> dict[str, Reply]:
        """Send each host in `requests` its request, and return the replies by host.

        A host without a reply after `seconds` is lost. `what` describes long work, for the notice printed meanwhile.
        """
        sessions = {name: self.sessions[name] for name in requests if name in self.sessions}
        pending = {
            self._pool.submit(session.ask, requests[name], reply, seconds=seconds): name
            for name, session in sessions.items()
        }
        self._wait(pending, what)
        return self._results(pending)

    def clocks(self) -> dict[str, ClockOffset]:
        """The offset of each host's clock from this machine's, measured by the quickest of a few requests."""
        pending = {self._pool.submit(_clock_offset, session): name for name, session in self.sessions.items()}
        wait(pending)
        return self._results(pending)

    def _session(self, host: Host) -> Session:
        peer = f"the probe of {label(host)}"
        return Session(lambda stderr: self.remote.open(host, MODULE, stderr=stderr), REPLIES, peer=peer)

    def _wait(self, pending: "Mapping[Future[Any], str]", what: str) -> None:
        left = set(pending)
        while left:
            left = wait(left, timeout=_NOTICE_SECONDS).not_done
            if left and what:
                self.say(f"waiting for {', '.join(sorted(pending[future] for future in left))}: {what}")

    def _results(self, pending: "Mapping[Future[Result], str]") -> dict[str, Result]:
        results = {}
        for future, name in pending.items():
            try:
                results[name] = future.result()
            except HostLostError as lost:
                self._lose(name, unreachable_check(name, lost.code, lost.stderr, self.remote.python))
            except RefusedError as refused:
                self._lose(name, Check("probe", name, "fail", refused.message, refused.hint))
            except MessageError:
                self._lose(name, other_program_check(name))
        return results

    def _lose(self, name: str, check: Check) -> None:
        self.lost.append(check)
        self.sessions.pop(name).end()


def _clock_offset(session: Session) -> ClockOffset:
    offsets = []
    for _ in range(_PINGS):
        began = time.time()
        there = session.ask(TimeRequest(), TimeReply, seconds=_PING_SECONDS).seconds
        ended = time.time()
        offsets.append(ClockOffset(there - (began + ended) / 2, ended - began))
    return min(offsets, key=lambda offset: offset.round_trip)
