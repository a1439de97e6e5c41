"""All hosts of a run at once: a probe on each, asked in parallel; a host that is lost on the way is reported once and
asked no more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

from ds_finetune.doctor.probe import MODULE
from ds_finetune.doctor.session import HostLostError, RefusedError, Session
from ds_finetune.doctor.system_checks import ClockOffset
from ds_finetune.errors import LaunchError
from ds_finetune.hostfile import Host
from ds_finetune.hosts.check import Check, label
from ds_finetune.hosts.unreachable import unreachable_check
from ds_finetune.launch.remote import Remote

Say = Callable[[str], None]
_PATIENCE_SECONDS = 15.0
_PINGS = 5
_PING_SECONDS = 10.0


class Cluster:
    """A probe on each host while in `with`; `lost` says which are gone and why."""

    def __init__(self, hosts: Sequence[Host], remote: Remote, say: Say) -> None:
        self.hosts, self.remote, self.say = {label(host): host for host in hosts}, remote, say
        self.sessions: dict[str, Session] = {}
        self.lost: list[Check] = []

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(max_workers=len(self.hosts))
        try:
            for name, host in self.hosts.items():
                self.sessions[name] = Session(lambda log, host=host: self.remote.open(host, MODULE, stderr=log))  # type: ignore[misc]
        except FileNotFoundError as absent:
            raise LaunchError(
                f"`{absent.filename}` is not installed here", hint="install it (Debian: openssh-client)"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not in the pool, all of whose threads may be waiting for answers that an interrupt has made pointless.
        with ThreadPoolExecutor(max_workers=len(self.hosts)) as ending:
            list(ending.map(Session.end, self.sessions.values()))
        self._pool.shutdown()

    def ask(
        self, verb: str, arguments: Mapping[str, Mapping[str, object]], *, seconds: float, what: str = ""
    ) -> dict[str, Any]:
        """Answers by host, of those that `arguments` names and that are still there; after `seconds` a silent one is
        lost.

        What takes long is said meanwhile as `what`.
        """
        asked = {name: self.sessions[name] for name in arguments if name in self.sessions}
        going = {self._pool.submit(asked[name].ask, verb, arguments[name], seconds=seconds): name for name in asked}
        self._wait_for(going, what)
        return {
            name: answer for future, name in going.items() if (answer := self._answer(future, name)) is not _NOTHING
        }

    def clocks(self) -> dict[str, ClockOffset]:
        """How far each host's clock is ahead of ours, from the quickest of a few questions."""
        going = {self._pool.submit(_clock, session): name for name, session in self.sessions.items()}
        wait(going)
        return {name: clock for future, name in going.items() if (clock := self._answer(future, name)) is not _NOTHING}

    def _wait_for(self, going: "Mapping[Future[Any], str]", what: str) -> None:
        left = set(going)
        while left:
            left = wait(left, timeout=_PATIENCE_SECONDS).not_done
            if left and what:
                self.say(f"waiting for {', '.join(sorted(going[future] for future in left))}: {what}")

    def _answer(self, future: "Future[Any]", name: str) -> Any:  # noqa: ANN401 - any JSON
        try:
            return future.result()
        except HostLostError as gone:
            self.lost.append(unreachable_check(name, gone.code, gone.said, self.remote.python))
        except RefusedError as refused:
            self.lost.append(Check("probe", name, "fail", refused.message, refused.hint))
        self.sessions.pop(name).end()
        return _NOTHING


_NOTHING = object()


def _clock(session: Session) -> ClockOffset:
    found = []
    for _ in range(_PINGS):
        began = time.time()
        there = session.ask("time", seconds=_PING_SECONDS)
        ended = time.time()
        found.append(ClockOffset(there - (began + ended) / 2, ended - began))
    return min(found, key=lambda clock: clock.round_trip)
