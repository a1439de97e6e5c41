"""One attempt of a run: a supervisor on each host, their messages, and how the attempt ended."""

import contextlib
import math
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ds_finetune.cluster.host_checks import Answer, label, other_program_check, unreachable_check
from ds_finetune.cluster.launch import messages
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.cluster.launch.supervisor import HEARTBEAT_SECONDS, TAIL_LINES
from ds_finetune.config.hostfile import Host
from ds_finetune.config.sections import LaunchConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, RUN_ERROR_EXIT_CODE
from ds_finetune.system.process_messages import MessageError, ProcessMessage, decode, encode, without_token
from ds_finetune.system.processes import PauseDetector, echo_seconds

GRACE_SECONDS = 4.0
"""Time between the first failure and the kill of all ranks; meanwhile the other ranks record what they wait for."""
_KILLING_SECONDS = 15.0
"""How long a host may take to report that all its processes have ended."""
_LAST_ERRORS_SECONDS = 2.0
SAVE_NOTICE = "asked the ranks to save and stop; signal again to kill them"
KILL_NOTICE = "killing every rank"


@dataclass(frozen=True)
class AttemptFailure:
    """A failure of a rank or of a host."""

    host: Host
    rank: int | None
    """None where the host itself failed."""
    text: str
    code: int
    """Exit code for the whole run."""
    tail: tuple[str, ...]
    """Last lines of the rank's output, or of the host's."""
    after: float = 0.0
    """Seconds since the ranks were started."""
    reason: str = ""
    """Why the rank ended without an exit code, as far as the host knows."""
    pid: int = 0
    cause: str = ""
    """Why the run ended, where the rank ended because of it."""
    is_printed: bool = False
    """Whether rank 0 has printed the same last lines."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended."""

    code: int
    """0 done, 3 saved after a signal; else the exit code of the first failed rank, 128 + N where signal N killed it."""
    first: AttemptFailure | None
    seconds: float
    ended_in: float
    """Seconds from the first failure until every host had reported its end or was lost."""
    lost: tuple[Host, ...]
    """Hosts that no longer answer."""
    unsupervised: tuple[Host, ...]
    """Hosts whose supervisor ended before it reported that all processes have ended."""
    remaining: Mapping[Host, int]
    """Number of processes, by host, that did not end although they were killed."""
    was_signalled: bool
    """Whether a signal asked for the end."""


@dataclass
class _SupervisedHost:
    """One host, the local process (ssh) that connects to its supervisor, and the state of both."""

    host: Host
    process: "subprocess.Popen[bytes]"
    ready: messages.HostReady | None = None
    unreadable: MessageError | None = None
    last_heard: float = field(default_factory=time.monotonic)
    is_over: bool = False
    is_lost: bool = False
    has_no_supervisor: bool = False
    launcher_code: int = 0
    num_remaining: int = 0
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def __post_init__(self) -> None:
        self.error_reader = threading.Thread(target=self._read_errors, daemon=True)

    def send(self, message: ProcessMessage) -> None:
        """Send a message; nothing happens where the supervisor has ended."""
        if self.is_over or self.process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def answer(self, python: str) -> Answer:
        """The facts of the host, or the failed check that says why there are none."""
        name = label(self.host)
        if self.unreadable is not None:
            return other_program_check(name)
        if self.ready is not None and not self.is_over:
            return self.ready.info
        if self.is_over:
            # The last output may still arrive.
            self.error_reader.join(_LAST_ERRORS_SECONDS)
        return unreachable_check(name, self._exit_code() if self.is_over else None, "\n".join(self.errors), python)

    def _exit_code(self) -> int | None:
        """None where the program has closed its output and does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_LAST_ERRORS_SECONDS)
        return None

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.decode(errors="replace").rstrip("\n"))


_Event = ProcessMessage | MessageError | None
"""A message of a host, or the error of an unreadable one; None is the end of its messages."""


class Attempt:
    """Supervisors on `hosts`, from their first message to their end; leaving the context ends all of them.

    `settings` has the times that a host has for its first message, and without a message until it is lost.
    """

    def __init__(self, hosts: Sequence[Host], remote: Remote, settings: LaunchConfig, *, port: int = 0) -> None:
        self._settings, self._python = settings, remote.python
        self._events = queue.Queue[tuple[_SupervisedHost, _Event]]()
        self._token = secrets.token_hex(8)
        arguments = ("ds_finetune.cluster.launch.supervisor", str(port), self._token)
        self._hosts = [_SupervisedHost(host, remote.open(host, *arguments)) for host in hosts]
        self._failures: list[tuple[float, AttemptFailure]] = []
        self._printed = deque[str](maxlen=10 * TAIL_LINES)
        self._codes: dict[tuple[Host, int], int] = {}
        self._signals: list[int] = []
        self._began = 0.0
        for supervised in self._hosts:
            threading.Thread(target=self._read, args=(supervised,), daemon=True).start()
            supervised.error_reader.start()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        for supervised in self._hosts:
            supervised.send(messages.KillRanks())
            with contextlib.suppress(OSError):
                assert supervised.process.stdin is not None
                supervised.process.stdin.close()
        until = time.monotonic() + _KILLING_SECONDS
        for supervised in self._hosts:
            try:
                supervised.process.wait(0 if supervised.is_lost else max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                supervised.process.kill()
                supervised.process.wait()

    def greetings(self) -> dict[Host, Answer]:
        """The facts of each host, or the failed check of one that cannot be reached, within the time for a greeting."""
        until = time.monotonic() + self._settings.greeting_seconds
        while any(each.ready is None and not each.is_over for each in self._hosts) and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                self._handle_event(*self._events.get(timeout=0.25))
        return {each.host: each.answer(self._python) for each in self._hosts}

    def run(self, orders: Mapping[Host, messages.StartRanks], say: Say) -> AttemptOutcome:
        """Start the ranks of `orders`, release the other hosts, and wait for the end; signals are passed on."""
        self._say = say
        for each in self._hosts:
            each.send(orders.get(each.host, messages.KillRanks()))
        released = [each for each in self._hosts if each.host not in orders]
        self._hosts = [each for each in self._hosts if each.host in orders]
        self._began = time.monotonic()
        for each in self._hosts:
            each.last_heard = self._began
            if each.is_over:
                # Its supervisor ended after the greeting.
                self._lose_supervisor(each)
        with handle_signals(self._signals.append):
            self._supervise()
        self._hosts += released
        return self._outcome()

    def _supervise(self) -> None:
        killed_at, last_beat, passed_on = None, 0.0, 0
        pauses = PauseDetector()
        while not all(each.is_over for each in self._hosts):
            with contextlib.suppress(queue.Empty):
                self._handle_event(*self._events.get(timeout=HEARTBEAT_SECONDS / 4))
            if pause := pauses.last_pause():
                for each in self._hosts:
                    each.last_heard += pause.monotonic_seconds
            now = time.monotonic()
            if now - last_beat >= HEARTBEAT_SECONDS:
                last_beat = now
                self._send(messages.Heartbeat())
            if passed_on < len(self._signals):
                passed_on += 1
                self._send(messages.SaveAndStop() if passed_on == 1 else messages.KillRanks())
                self._say(SAVE_NOTICE if passed_on == 1 else KILL_NOTICE)
            self._give_up_silent_hosts(now, killed_at)
            if killed_at is None and self._failures and now - self._failures[0][0] > self._grace_seconds():
                killed_at = now
                self._send(messages.KillRanks())

    def _grace_seconds(self) -> float:
        """Time from the first failure to the kill; unlimited while ranks save after a signal and exit one by one."""
        is_saving = all(failure.code == INTERRUPTED_EXIT_CODE for _, failure in self._failures)
        return math.inf if is_saving else GRACE_SECONDS

    def _give_up_silent_hosts(self, now: float, killed_at: float | None) -> None:
        is_slow = killed_at is not None and now - killed_at > _KILLING_SECONDS
        for each in self._hosts:
            if not each.is_over and (now - each.last_heard > self._settings.silent_seconds or is_slow):
                each.is_over = each.is_lost = True
                # The host failed when it was last heard from: failures that others reported later are consequences.
                self._fail_host(each, f"no message for {now - each.last_heard:.0f} s", at=each.last_heard)

    def _send(self, message: ProcessMessage) -> None:
        for each in self._hosts:
            each.send(message)

    def _read(self, supervised: _SupervisedHost) -> None:
        assert supervised.process.stdout is not None
        peer = f"the supervisor of {supervised.host.target}"
        for line in supervised.process.stdout:
            body = without_token(line.rstrip(b"\n"), self._token)
            if body is None:
                continue
            supervised.last_heard = time.monotonic()
            try:
                event: _Event = decode(body, messages.FROM_SUPERVISOR, peer=peer)
            except MessageError as error:
                event = error
            self._events.put((supervised, event))
        self._events.put((supervised, None))

    def _handle_event(self, supervised: _SupervisedHost, event: _Event) -> None:
        if supervised.is_lost:
            return
        match event:
            case messages.HostReady():
                supervised.ready = event
            case messages.RanksStarted(interface):
                where = f", network interface {interface}" if interface else ""
                self._say(f"started on {supervised.host.target}{where}")
            case messages.RankZeroOutput(text):
                self._say(text)
                self._printed.extend(text.splitlines())
            case messages.RankEnded():
                self._end_rank(supervised, event)
            case messages.ExitCodeReported(pid, code):
                self._codes[supervised.host, pid or self._first_failed_pid(supervised.host)] = code
            case messages.HostDone():
                self._end_host(supervised, event)
            case MessageError():
                self._drop_host(supervised, event)
            case None:
                self._end_messages(supervised)

    def _end_host(self, supervised: _SupervisedHost, done: messages.HostDone) -> None:
        supervised.is_over = True
        supervised.launcher_code, supervised.num_remaining = done.launcher_code, done.num_remaining
        if done.launcher_code and not any(failure.host == supervised.host for _, failure in self._failures):
            text = f"its node launcher {_exit_text(done.launcher_code)}"
            self._fail_host(supervised, text, tail=done.launcher_tail)

    def _end_messages(self, supervised: _SupervisedHost) -> None:
        is_early, supervised.is_over = not supervised.is_over, True
        if is_early and self._began:
            self._lose_supervisor(supervised)

    def _drop_host(self, supervised: _SupervisedHost, error: MessageError) -> None:
        supervised.is_over, supervised.unreadable = True, error
        if self._began:
            supervised.has_no_supervisor = True
            self._fail_host(supervised, str(error))

    def _lose_supervisor(self, supervised: _SupervisedHost) -> None:
        supervised.has_no_supervisor = True
        self._fail_host(supervised, "its supervisor ended")

    def _end_rank(self, supervised: _SupervisedHost, ended: messages.RankEnded) -> None:
        if ended.code == 0:
            return
        text = "" if ended.code is None else f"exited with code {ended.code}"
        failure = AttemptFailure(supervised.host, ended.rank, text, ended.code or 0, tuple(ended.tail))
        failure = replace(failure, reason=ended.reason, pid=ended.pid, cause=ended.cause)
        self._failures.append((time.monotonic(), failure))

    def _fail_host(
        self, supervised: _SupervisedHost, text: str, *, at: float | None = None, tail: Sequence[str] = ()
    ) -> None:
        lines = tuple(tail) or tuple(supervised.errors)
        failure = AttemptFailure(supervised.host, None, text, RUN_ERROR_EXIT_CODE, lines)
        self._failures.append((at or time.monotonic(), failure))
        # A host that fell silent failed when it was last heard from, which may be earlier than failures known so far.
        self._failures.sort(key=lambda item: item[0])

    def _first_failed_pid(self, host: Host) -> int:
        return next((failure.pid for _, failure in self._failures if failure.host == host and failure.pid), 0)

    def _end_without_code(self, failure: AttemptFailure) -> tuple[int, str]:
        """Exit code and text for a rank that reported no exit code.

        The node launcher reports them. Where it was killed itself, its ranks were killed with it.
        """
        reported = self._codes.get((failure.host, failure.pid))
        if reported is not None:
            return exit_code_of(reported), _exit_text(reported)
        if failure.cause:
            return RUN_ERROR_EXIT_CODE, "ended without reporting an exit code"
        launcher_code = next(each.launcher_code for each in self._hosts if each.host == failure.host)
        if launcher_code < 0:
            return exit_code_of(launcher_code), f"ended with its node launcher, which {_exit_text(launcher_code)}"
        return 128 + signal.SIGKILL, "ended without reporting an exit code"

    def _outcome(self) -> AttemptOutcome:
        now = time.monotonic()
        lost = tuple(each.host for each in self._hosts if each.is_lost)
        was_signalled = bool(self._signals)
        if not self._failures:
            return AttemptOutcome(0, None, now - self._began, 0.0, lost, (), {}, was_signalled)
        at, first = self._failures[0]
        text, code = first.text, first.code
        if first.rank is not None and not code:
            code, text = self._end_without_code(first)
            text = f"{text}: {first.reason}" if first.reason else text
        is_printed = first.rank == 0 or (bool(first.tail) and set(first.tail) <= set(self._printed))
        first = replace(first, text=text, code=code, after=at - self._began, is_printed=is_printed)
        unsupervised = tuple(each.host for each in self._hosts if each.has_no_supervisor)
        remaining = {each.host: each.num_remaining for each in self._hosts if each.num_remaining}
        return AttemptOutcome(code, first, now - self._began, now - at, lost, unsupervised, remaining, was_signalled)


@contextmanager
def handle_signals(handler: Callable[[int], object]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP by `handler`, once for a request and its echoes; ignored signals, as SIGHUP
    under `nohup`, stay ignored.
    """
    latest = -math.inf

    def handle(number: int, _: object) -> None:
        nonlocal latest
        if (now := time.monotonic()) - latest > echo_seconds(number):
            latest = now
            handler(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def exit_code_of(code: int) -> int:
    """The exit code for a process that ended with `code`, which is negative for a signal."""
    return 128 - code if code < 0 else code or RUN_ERROR_EXIT_CODE


def _exit_text(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
