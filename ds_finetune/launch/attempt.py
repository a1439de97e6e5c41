"""One start of a run on its hosts: a guard on each, what they say, and how it ended."""

import contextlib
import math
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds_finetune.errors import INTERRUPTED_EXIT_CODE, RUN_ERROR_EXIT_CODE
from ds_finetune.hostfile import Host
from ds_finetune.hosts.check import label
from ds_finetune.hosts.info import HostInfo
from ds_finetune.hosts.unreachable import other_program_check, unreachable_check
from ds_finetune.launch.messages import Message, packed, unpacked
from ds_finetune.launch.preflight import Answer
from ds_finetune.launch.remote import Remote
from ds_finetune.launch.supervisor import BEAT_SECONDS, TAIL

ECHO_SECONDS = 2.0
"""Signals so close to each other are one."""
LAST_WORDS_SECONDS = 4.0
"""Between the first failure and the end of everything: other ranks write down where they stand."""
_KILLING_SECONDS = 15.0
"""How long a host has to say that nothing is left on it."""
_LAST_ERRORS_SECONDS = 2.0


@dataclass(frozen=True)
class HostTimeouts:
    """Seconds: `greeting` for a host's first word, `silent` without one after which it is given up."""

    greeting: float
    silent: float


@dataclass(frozen=True)
class AttemptFailure:
    """What went wrong first."""

    host: Host
    rank: int | None
    """None where the host itself failed."""
    text: str
    code: int
    """Exit code for the whole run."""
    tail: tuple[str, ...]
    """Last lines of the rank's output, or of the host's."""
    after: float
    """Seconds since the ranks were started."""
    why: str = ""
    """What is known of an end by a signal."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended."""

    code: int
    """0 done, 3 saved after a signal, else the first failing rank's own, 128 + N where signal N ended it."""
    first: AttemptFailure | None
    seconds: float
    ended_in: float
    """Seconds from the first failure until every host had said that nothing is left on it, or was given up."""
    lost: tuple[Host, ...]
    """Hosts that no longer answer."""
    unsupervised: tuple[Host, ...]
    """Hosts whose guard was gone before it could say that nothing is left."""
    left: Mapping[Host, int]
    """Processes that had not ended some seconds after they were told to, by host."""
    was_told: bool
    """Whether a signal asked for the end."""


@dataclass
class _SupervisedHost:
    """One host as it is seen from here."""

    host: Host
    process: "subprocess.Popen[bytes]"
    greeting: Message | None = None
    heard: float = field(default_factory=time.monotonic)
    over: bool = False
    is_lost: bool = False
    is_gone: bool = False
    agent_code: int = 0
    left: int = 0
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))

    def __post_init__(self) -> None:
        """The thread that keeps what ssh and the guard complain of."""
        self.error_reader = threading.Thread(target=_keep_errors, args=(self,), daemon=True)

    def tell(self, **message: object) -> None:
        """Send a message; nothing where nobody reads any more."""
        if self.over or self.process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.write(packed(**message))
            self.process.stdin.flush()


class Attempt:
    """Guards on `hosts`, from their greeting to their end; as a context it leaves none behind."""

    def __init__(self, hosts: Sequence[Host], remote: Remote, limits: HostTimeouts, *, port: int = 0) -> None:
        self._limits = limits
        self._events = queue.Queue[tuple[_SupervisedHost, Message]]()
        self._python = remote.python
        self._word = secrets.token_hex(8)
        arguments = ("ds_finetune.launch.supervisor", str(port), self._word)
        self._guards = [_SupervisedHost(host, remote.open(host, *arguments)) for host in hosts]
        self._failures: list[tuple[float, AttemptFailure, int]] = []
        self._codes: dict[tuple[Host, int], int] = {}
        self._signals, self._signalled_at = 0, -math.inf
        self._began = 0.0
        for guard in self._guards:
            threading.Thread(target=self._read, args=(guard,), daemon=True).start()
            guard.error_reader.start()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        for guard in self._guards:
            guard.tell(do="end")
            with contextlib.suppress(OSError):
                assert guard.process.stdin is not None
                guard.process.stdin.close()
        until = time.monotonic() + _KILLING_SECONDS
        for guard in self._guards:
            try:
                guard.process.wait(0 if guard.is_lost else max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                guard.process.kill()
                guard.process.wait()

    def greetings(self) -> dict[Host, Answer]:
        """The facts of each host, or the failed check of one that cannot be reached; after some seconds at most."""
        until = time.monotonic() + self._limits.greeting
        while any(guard.greeting is None and not guard.over for guard in self._guards) and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                self._take(*self._events.get(timeout=0.25))
        return {guard.host: self._answer(guard) for guard in self._guards}

    def _answer(self, guard: _SupervisedHost) -> Answer:
        name = label(guard.host)
        if guard.greeting is not None and not guard.over:
            return HostInfo.read(guard.greeting["info"]) or other_program_check(name)
        if guard.over:
            # The last output is still on its way.
            guard.error_reader.join(_LAST_ERRORS_SECONDS)
        code = guard.process.wait() if guard.over else None
        return unreachable_check(name, code, "\n".join(guard.errors), self._python)

    def run(self, specs: Mapping[Host, Message], say: Callable[[str], None]) -> AttemptOutcome:
        """Start what `specs` says on their hosts, release the others, and return how it ended; signals are passed
        on.
        """
        self._say = say
        for guard in self._guards:
            guard.tell(**specs.get(guard.host, {"do": "end"}))
        released = [guard for guard in self._guards if guard.host not in specs]
        self._guards = [guard for guard in self._guards if guard.host in specs]
        self._began = time.monotonic()
        for guard in self._guards:
            guard.heard = self._began
            if guard.over:
                # It went after its greeting.
                self._host_is_over(guard, {"said": "gone"})
        # What is ignored stays ignored: `nohup`, and what a script starts in the background.
        wanted = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, self._signalled) for number in wanted}
        try:
            self._watch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._guards += released
        return self._outcome()

    def _watch(self) -> None:
        """Until every host is done or given up."""
        told, beat, passed_on = None, 0.0, 0
        while not all(guard.over for guard in self._guards):
            with contextlib.suppress(queue.Empty):
                self._take(*self._events.get(timeout=BEAT_SECONDS / 4))
            now = time.monotonic()
            if now - beat >= BEAT_SECONDS:
                beat = now
                self._tell(do="beat")
            if passed_on < self._signals:
                passed_on += 1
                self._tell(do="interrupt" if passed_on == 1 else "end")
                self._say(
                    "told the ranks to save and end; once more ends them at once"
                    if passed_on == 1
                    else "ending every rank"
                )
            self._look_for_silence(now, told)
            if told is None and self._failures and now - self._failures[0][0] > self._patience():
                told = now
                self._tell(do="end")

    def _patience(self) -> float:
        """Ranks that save after a signal end at their own times; else the others are ended soon."""
        saving = all(failure.code == INTERRUPTED_EXIT_CODE for _, failure, _ in self._failures)
        return float("inf") if saving else LAST_WORDS_SECONDS

    def _look_for_silence(self, now: float, told: float | None) -> None:
        for guard in self._guards:
            is_slow = told is not None and now - told > _KILLING_SECONDS
            if not guard.over and (now - guard.heard > self._limits.silent or is_slow):
                guard.over = guard.is_lost = True
                # A host that is silent was lost when it was last heard: what others say since then follows from it.
                self._host_failed(guard, f"has not been heard for {now - guard.heard:.0f} s", at=guard.heard)

    def _tell(self, **message: object) -> None:
        for guard in self._guards:
            guard.tell(**message)

    def _signalled(self, number: int, _: object) -> None:
        now = time.monotonic()
        if now - self._signalled_at > ECHO_SECONDS:
            # A closing terminal signals twice, and wrappers pass on what this process has had already.
            self._signals, self._signalled_at = self._signals + 1, now

    def _read(self, guard: _SupervisedHost) -> None:
        assert guard.process.stdout is not None
        for line in guard.process.stdout:
            if (message := unpacked(line.decode(errors="replace"), to=self._word)) is not None:
                guard.heard = time.monotonic()
                self._events.put((guard, message))
        self._events.put((guard, {"said": "gone"}))

    def _take(self, guard: _SupervisedHost, message: Message) -> None:
        if guard.is_lost:
            return
        match message.get("said"):
            case "hello":
                guard.greeting = message
            case "started":
                where = f", network interface {message['interface']}" if message["interface"] else ""
                self._say(f"started on {guard.host.target}{where}")
            case "out":
                self._say(message["text"])
            case "rank" if message["code"] != 0:
                self._rank_failed(guard, message)
            case "exit_code":
                self._codes[guard.host, message["pid"] or self._last_gone(guard)] = message["code"]
            case "exited" | "gone" if not guard.over:
                guard.over = True
                self._host_is_over(guard, message)

    def _host_is_over(self, guard: _SupervisedHost, message: Message) -> None:
        if message["said"] == "gone":
            guard.is_gone = bool(self._began)
            if guard.is_gone:
                self._host_failed(guard, "its guard is gone")
            return
        guard.agent_code, guard.left = message["code"], message["left"]
        if guard.agent_code and not any(failure.host == guard.host for _, failure, _ in self._failures):
            self._host_failed(guard, f"its launcher ended with {message['code']}", tail=message["agent"])

    def _rank_failed(self, guard: _SupervisedHost, message: dict[str, Any]) -> None:
        code = message["code"]
        text = "is gone without a word" if code is None else f"ended with {code}"
        failure = AttemptFailure(
            guard.host, message["rank"], text, code or 0, tuple(message["tail"]), 0.0, message["why"]
        )
        self._add(time.monotonic(), failure, message["pid"])

    def _host_failed(self, guard: _SupervisedHost, text: str, *, at: float | None = None, tail: str = "") -> None:
        lines = tuple(tail.splitlines()) or tuple(guard.errors)
        self._add(at or time.monotonic(), AttemptFailure(guard.host, None, text, RUN_ERROR_EXIT_CODE, lines, 0.0), 0)

    def _add(self, at: float, failure: AttemptFailure, pid: int) -> None:
        self._failures.append((at, failure, pid))
        self._failures.sort(key=lambda item: item[0])

    def _why_gone(self, host: Host, pid: int) -> tuple[int, str]:
        """Exit code and words for a rank that is gone without a word: its agent's, or the agent's own end, which ranks
        do not outlive.
        """
        if (host, pid) in self._codes:
            return _of_signal(self._codes[host, pid])
        agent = next(guard.agent_code for guard in self._guards if guard.host == host)
        if agent < 0:
            return 128 - agent, f"is gone with its agent, which {_of_signal(agent)[1]}"
        return 128 + signal.SIGKILL, "is gone without a word"

    def _last_gone(self, guard: _SupervisedHost) -> int:
        gone = [pid for _, failure, pid in self._failures if failure.host == guard.host and pid]
        return gone[0] if gone else 0

    def _outcome(self) -> AttemptOutcome:
        now = time.monotonic()
        lost = tuple(guard.host for guard in self._guards if guard.is_lost)
        if not self._failures:
            return AttemptOutcome(0, None, now - self._began, 0.0, lost, (), {}, self._signals > 0)
        at, first, pid = self._failures[0]
        text, code = first.text, first.code
        if first.rank is not None and not code:
            code, text = self._why_gone(first.host, pid)
            text = f"{text}: {first.why}" if first.why else text
        first = replace(first, text=text, code=code, after=at - self._began)
        unsupervised = tuple(guard.host for guard in self._guards if guard.is_gone)
        left = {guard.host: guard.left for guard in self._guards if guard.left}
        return AttemptOutcome(code, first, now - self._began, now - at, lost, unsupervised, left, self._signals > 0)


def _of_signal(code: int) -> tuple[int, str]:
    """Exit code and words for what a process that could not say so itself ended with."""
    if code >= 0:
        return code or RUN_ERROR_EXIT_CODE, f"ended with {code}"
    return 128 - code, f"was ended by {signal.Signals(-code).name}"


def _keep_errors(guard: _SupervisedHost) -> None:
    assert guard.process.stderr is not None
    for line in guard.process.stderr:
        guard.errors.append(line.decode(errors="replace").rstrip("\n"))
