"""The supervisor of one host: it starts the host's ranks, relays their output, and kills them when it must.

The launching program starts `python -m ds_finetune.cluster.launch.supervisor PORT TOKEN` through ssh. Both exchange the
messages of cluster/launch/messages.py over standard input and output. Lines of the supervisor begin with TOKEN, so that
the output of a login shell is not mistaken for a message. The supervisor kills every process of the run on its host
when it is ordered to, when the launching program is gone or has been silent for some seconds, and when it is ended
itself.

It does not import torch, and starts in a fraction of a second.
"""

import contextlib
import os
import re
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ds_finetune.cluster.launch import messages
from ds_finetune.cluster.launch.line_thread import LineThread
from ds_finetune.cluster.launch.process_tags import (
    SUPERVISOR_VARIABLE,
    TAG_VARIABLE,
    die_with_parent,
    kill_tagged,
    log_name,
)
from ds_finetune.cluster.watchdog.kills import oom_kills, recorded_cause, why_killed
from ds_finetune.system.info import gather_host_info, interface_towards
from ds_finetune.system.process_messages import MessageError, ProcessMessage, decode, encode
from ds_finetune.system.processes import PauseDetector, began_at

TAIL_LINES = 50
"""Last lines of a rank's output that are kept for a report."""
_TAIL_CHARACTERS = 2000
"""Characters kept of each of these lines."""
LINGERING_SECONDS = 60.0
"""How long a rank's process may remain after it has reported its exit code."""
HEARTBEAT_SECONDS = 1.0
"""Interval of heartbeats, in both directions."""
_READ_BYTES = 2**16
_MAX_OUTPUT_BYTES = 2**19
"""A longer line of output is cut into lines of this size, so that a message with one stays below its limit."""
_EXIT_CODE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)|exits with return code = (-?\d+)")
"""How a rank ended, in the words of torchrun (2.13, elastic/multiprocessing/api.py:1003) and DeepSpeed (0.19.8,
launcher/launch.py:259).
"""
_FIRST: tuple[type[messages.RankConnected | messages.RankOutput], ...] = (messages.RankConnected, messages.RankOutput)
_ORDER_SECONDS = 120
"""How long a supervisor without an order waits for the launching program."""


class Supervisor:
    """The processes of one attempt on this host, and the connections to them and to the launching program."""

    def __init__(self, order: messages.StartRanks) -> None:
        self._order = order
        self._selector = selectors.DefaultSelector()
        self._tails: dict[int, deque[str]] = {}
        self._pids: dict[int, int] = {}
        self._start_times: dict[int, str] = {}
        self._oom_kills = oom_kills()
        self._ended_at: dict[int, float] = {}
        self._connected: set[int] = set()
        self._launcher_tail = deque[str](maxlen=TAIL_LINES)
        self._last_heard = time.monotonic()
        self._log = LineThread(partial(_append, Path(order.logs)))
        self._is_over = False

    def run(self) -> int:
        """Start the node launcher, serve until it has ended and report that; returns this process's exit code."""
        if self._order.earlier_tags:
            kill_tagged(self._order.earlier_tags)
        name = f"ds-finetune-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(f"\0{name}")
            listening.listen(1024)
            self._selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))
            self._listen(0, self._handle_order, self._kill_without_order)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._exit_on_signal)
            launcher = self._start(name)
            self._serve(launcher)
        num_remaining = self._kill_ranks()
        # A node launcher may fail where none of its ranks did.
        _report(messages.HostDone(launcher.wait(), list(self._launcher_tail), num_remaining))
        self._log.close()
        return 0

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        order = self._order
        env = {**os.environ, **order.env, TAG_VARIABLE: order.tag, SUPERVISOR_VARIABLE: name}
        if order.meeting_address and (interface := interface_towards(order.meeting_address)):
            env = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | env
        launcher = subprocess.Popen(
            order.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in env.items() if name not in order.unset},
            start_new_session=True,
            preexec_fn=die_with_parent,  # No other thread of this process could hold a lock yet.
        )
        assert launcher.stdout is not None
        self._listen(launcher.stdout.fileno(), self._read_launcher_line, lambda: None)
        _report(messages.RanksStarted(env.get("GLOO_SOCKET_IFNAME", "")))
        return launcher

    def _serve(self, launcher: "subprocess.Popen[bytes]") -> None:
        last_beat = 0.0
        ended_since: float | None = None
        pauses = PauseDetector()
        while not self._is_over:
            for key, _ in self._selector.select(timeout=HEARTBEAT_SECONDS / 4):
                key.data()
            if pause := pauses.last_pause():
                self._last_heard += pause.monotonic_seconds
            now = time.monotonic()
            if now - last_beat >= HEARTBEAT_SECONDS:
                _report(messages.Heartbeat())
                last_beat = now
            if now - self._last_heard > self._order.silent_seconds:
                self._kill_without_order()
            if launcher.poll() is not None and ended_since is None:
                ended_since = now
            self._kill_lingering(now)
            # The last output of the ranks may still arrive.
            self._is_over = self._is_over or (ended_since is not None and now - ended_since > HEARTBEAT_SECONDS)

    def _kill_lingering(self, now: float) -> None:
        """Kill ranks that still run after they have reported their exit code, as with a thread that waits forever."""
        for rank, since in list(self._ended_at.items()):
            if rank in self._connected and now - since > LINGERING_SECONDS:
                self._connected.discard(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)

    def _kill_ranks(self) -> int:
        """Kill every process of the attempt on this host, with heartbeats meanwhile; returns how many did not end."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT_SECONDS):
                _report(messages.Heartbeat())

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        num_remaining = kill_tagged([self._order.tag])
        stop.set()
        thread.join()
        return num_remaining

    def _listen(self, file: int, on_line: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        lines = _OutputLines()

        def read() -> None:
            piece = b""
            with contextlib.suppress(OSError):
                piece = os.read(file, _READ_BYTES)
            for line in lines.feed(piece):
                on_line(line)
            if not piece:
                self._selector.unregister(file)
                on_end()

        self._selector.register(file, selectors.EVENT_READ, read)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            # Any user of the host can connect to the socket: its name is public.
            connection.close()
            return
        reader = _RankConnection(self)

        def on_end() -> None:
            connection.close()
            reader.end()

        self._listen(connection.fileno(), reader.read_line, on_end)

    def connect_rank(self, first: messages.RankConnected) -> None:
        """Register the process of a rank that has started."""
        rank = first.rank
        self._pids[rank], self._start_times[rank] = first.pid, began_at(first.pid)
        self._connected.add(rank)
        self._log.put(log_name(rank), f"rank {rank} on {socket.gethostname()}, pid {first.pid}")

    def disconnect_rank(self, rank: int) -> None:
        """Handle the end of a rank's process; report it where the rank has sent no exit code."""
        self._connected.discard(rank)
        if rank not in self._ended_at:
            self.end_rank(rank, None)

    def keep_output(self, rank: int, line: str) -> None:
        """Keep a line that a rank has printed, in its log and for a report; pass on the output of rank 0."""
        self._tails.setdefault(rank, deque(maxlen=TAIL_LINES)).append(line[:_TAIL_CHARACTERS])
        self._log.put(log_name(rank), line)
        if rank == 0:
            _report(messages.RankZeroOutput(line))

    def end_rank(self, rank: int, code: int | None) -> None:
        """Report the end of a rank with its exit code, None where its process ended without one."""
        self._ended_at[rank] = time.monotonic()
        tail = [] if code == 0 else list(self._tails.get(rank, ()))
        reason = self._reason(rank) if code is None else ""
        pid, start_time = self._pids.get(rank, 0), self._start_times.get(rank, "")
        cause = recorded_cause(Path(self._order.watchdog), pid, start_time) if code != 0 else ""
        _report(messages.RankEnded(rank, pid, code, tail, reason, cause))

    def _reason(self, rank: int) -> str:
        """Why a rank ended without an exit code: the watchdog, or a lack of memory; empty where unknown."""
        pid, start_time = self._pids.get(rank, 0), self._start_times.get(rank, "")
        if killed := why_killed(Path(self._order.watchdog), pid, start_time):
            return f"by the watchdog, because {killed}"
        count = oom_kills() - self._oom_kills
        return f"the kernel killed {count} processes of the host for want of memory meanwhile" if count > 0 else ""

    def _read_launcher_line(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._launcher_tail.append(text[:_TAIL_CHARACTERS])
        self._log.put(f"agent-{socket.gethostname()}.log", text)
        for code, pid, other in _EXIT_CODE.findall(text):
            _report(messages.ExitCodeReported(int(pid or 0), int(code or other)))

    def _handle_order(self, line: bytes) -> None:
        self._last_heard = time.monotonic()
        order = decode(line, messages.FROM_LAUNCHER, peer="the launching program")
        if isinstance(order, messages.SaveAndStop):
            for pid in (pid for rank, pid in self._pids.items() if rank not in self._ended_at):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        elif isinstance(order, messages.KillRanks):
            self._kill_ranks()

    def _kill_without_order(self) -> None:
        """Kill the ranks because the launching program is gone or silent."""
        kill_tagged([self._order.tag])
        self._is_over = True

    def _exit_on_signal(self, number: int, _: object) -> None:
        kill_tagged([self._order.tag])
        os._exit(128 + number)


class _RankConnection:
    """A connection of a rank: its first line says whether the following lines are output or control messages."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._first: messages.RankConnected | messages.RankOutput | None = None

    def read_line(self, line: bytes) -> None:
        """Take one line; one that cannot be read is reported to the launching program and dropped."""
        try:
            if self._first is None:
                self._first = decode(line, _FIRST, peer="a process of this host")
                if isinstance(self._first, messages.RankConnected):
                    self._supervisor.connect_rank(self._first)
            elif isinstance(self._first, messages.RankOutput):
                self._supervisor.keep_output(self._first.rank, line.decode(errors="replace"))
            else:
                rank_exit = decode(line, (messages.RankExit,), peer=f"rank {self._first.rank}")
                self._supervisor.end_rank(self._first.rank, rank_exit.code)
        except MessageError as error:
            # The launching program keeps the standard error for its report.
            sys.stderr.write(f"{error}\n")

    def end(self) -> None:
        if isinstance(self._first, messages.RankConnected):
            self._supervisor.disconnect_rank(self._first.rank)


class _OutputLines:
    """Splits a stream of bytes into lines; a line longer than the limit becomes several lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends; an empty piece is the end of the stream."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_OUTPUT_BYTES or (self._rest and not piece):
            lines, self._rest = [*lines, self._rest], b""
        return lines


def _append(folder: Path, name: str, line: str) -> bool:
    """Write a line of a rank's output. Where the disk is full, the files miss lines; the launching program still gets
    the output of rank 0.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return True


_WRITE_LOCK = threading.Lock()


def _report(message: ProcessMessage) -> None:
    """Write a message to the launching program, after the token, which is the last argument of this process."""
    # Where ssh has ended, writing fails; the missing heartbeats on standard input then end this process.
    with contextlib.suppress(OSError), _WRITE_LOCK:
        sys.stdout.buffer.write(encode(message, token=sys.argv[-1]))
        sys.stdout.buffer.flush()


def main() -> int:
    """Report the facts of this host, wait for an order, and supervise the ranks that it starts."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if sys.argv[1:2] == ["kill"]:
        _report(messages.LeftoversKilled(kill_tagged(sys.argv[2:])))
        return 0
    # Start a new line: a login shell may have printed text without a newline.
    sys.stdout.buffer.write(b"\n")
    _report(messages.HostReady(gather_host_info(int(sys.argv[1]))))
    # Unbuffered: the supervisor itself reads the messages after the first order.
    with open(0, "rb", buffering=0, closefd=False) as orders:
        while select.select([orders], [], [], _ORDER_SECONDS)[0] and (line := orders.readline()):
            order = decode(line.rstrip(b"\n"), messages.FROM_LAUNCHER, peer="the launching program")
            if isinstance(order, messages.StartRanks):
                return _supervise(order)
            if isinstance(order, messages.KillRanks):
                return 0
    return 0


def _supervise(order: messages.StartRanks) -> int:
    try:
        return Supervisor(order).run()
    except MessageError as error:
        sys.stderr.write(f"{error}\n")
        kill_tagged([order.tag])
        return 1


if __name__ == "__main__":
    sys.exit(main())
