"""On each host: starts the host's agent (torchrun's or DeepSpeed's), keeps the ranks' output, and ends all of it when
it must.

`python -m ds_finetune.launch.supervisor PORT WORD` is started by the launching program through ssh and speaks with it
by
lines of JSON on standard input and output; those of the guard carry WORD. It ends every process of the run on its host
when it is told to, when the launching program has been silent for some seconds or is gone, and when it is ended itself.
It imports next to nothing and starts in a fraction of a second.
"""

import contextlib
import os
import queue
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
from dataclasses import asdict
from pathlib import Path

from ds_finetune.hosts.info import gather_host_info, interface_towards
from ds_finetune.launch.messages import Lines, Message, packed, unpacked
from ds_finetune.launch.process_tags import SUPERVISOR_VARIABLE, TAG_VARIABLE, die_with_parent, kill_tagged, log_name
from ds_finetune.watchdog.process_death import began_at, oom_kills, why_killed

TAIL = 50
"""Last lines of a rank's output that are kept for a report."""
LINGERING_SECONDS = 60.0
"""How long a rank may be there after it has said how it ended."""
BEAT_SECONDS = 1.0
"""Between two signs of life, in both directions."""
_PIECE = 65536
_EXIT_CODE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)|exits with return code = (-?\d+)")
"""How a rank ended, in the words of torchrun (2.13, elastic/multiprocessing/api.py:1003) and DeepSpeed (0.19.8,
launcher/launch.py:259).
"""
_GREETING_SECONDS = 120
"""How long a guard that was told nothing waits for the launching program."""


class Supervisor:
    """The processes of one attempt on this host, and everyone this host hears."""

    def __init__(self, spec: Message) -> None:
        self._spec = spec
        self._mark: str = spec["mark"]
        self._logs = Path(spec["logs"])
        self._selector = selectors.DefaultSelector()
        self._tails: dict[int, deque[str]] = {}
        self._pids: dict[int, int] = {}
        self._began: dict[int, str] = {}
        self._oom_kills = oom_kills()
        self._ended: dict[int, int] = {}
        self._ended_at: dict[int, float] = {}
        self._there: set[int] = set()
        self._agent_tail = deque[str](maxlen=TAIL)
        self._heard = time.monotonic()
        self._log = _LogFiles(self._logs)
        self._over = False

    def run(self) -> int:
        """Start the agent and serve until it has ended and everyone is told; returns this process's exit code."""
        if self._spec["sweep"]:
            kill_tagged(self._spec["sweep"])
        name = f"ds-finetune-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(f"\0{name}")
            listening.listen(1024)
            self._selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))
            self._listen(0, self._told, self._alone)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._leave)
            agent = self._start(name)
            self._serve(agent)
        left = self._end()
        # A host's agent may fail where none of its ranks did.
        _say(said="exited", code=agent.wait(), agent="\n".join(self._agent_tail), left=left)
        self._log.close()
        return 0

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        spec = self._spec
        env = {**os.environ, **spec["env"], TAG_VARIABLE: self._mark, SUPERVISOR_VARIABLE: name}
        if spec["meet_at"] and (interface := interface_towards(spec["meet_at"])):
            env = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | env
        agent = subprocess.Popen(
            spec["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in env.items() if name not in spec["unset"]},
            start_new_session=True,
            preexec_fn=die_with_parent,  # No other thread of this process could hold a lock yet.
        )
        assert agent.stdout is not None
        self._listen(agent.stdout.fileno(), self._agent_said, lambda: None)
        self._log.start()
        _say(said="started", pid=agent.pid, interface=env.get("GLOO_SOCKET_IFNAME", ""))
        return agent

    def _serve(self, agent: "subprocess.Popen[bytes]") -> None:
        beat = 0.0
        ended_since: float | None = None
        while not self._over:
            for key, _ in self._selector.select(timeout=BEAT_SECONDS / 4):
                key.data()
            now = time.monotonic()
            if now - beat >= BEAT_SECONDS:
                _say(said="beat")
                beat = now
            if now - self._heard > self._spec["silent_seconds"]:
                self._alone()
            if agent.poll() is not None and ended_since is None:
                ended_since = now
            self._end_lingering(now)
            # What ranks said last is still on its way.
            self._over = self._over or (ended_since is not None and now - ended_since > BEAT_SECONDS)

    def _end_lingering(self, now: float) -> None:
        """A rank that has said how it ended and is still there waits for something that nobody minds any more."""
        for rank, since in list(self._ended_at.items()):
            if rank in self._there and now - since > LINGERING_SECONDS:
                self._there.discard(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)

    def _end(self) -> int:
        """End every process of the run on this host, with signs of life meanwhile; returns how many do not end."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT_SECONDS):
                _say(said="beat")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        left = kill_tagged([self._mark])
        stop.set()
        thread.join()
        return left

    def _listen(self, file: int, on_line: Callable[[str], None], on_end: Callable[[], None]) -> None:
        lines = Lines()

        def ready() -> None:
            piece = b""
            with contextlib.suppress(OSError):
                piece = os.read(file, _PIECE)
            if not piece:
                self._selector.unregister(file)
                if lines.rest():
                    on_line(lines.rest())
                on_end()
                return
            for line in lines.feed(piece):
                on_line(line)

        self._selector.register(file, selectors.EVENT_READ, ready)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        _, user, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if user != os.getuid():
            # The socket's name is no secret on its host.
            connection.close()
            return
        first: Message = {}

        def on_line(line: str) -> None:
            if first:
                self._rank_said(first, line)
                return
            first.update({"said": "output", "rank": -1} | (unpacked(line) or {}))
            if first["said"] == "rank":
                self._pids[first["rank"]] = first["pid"]
                self._began[first["rank"]] = began_at(first["pid"])
                self._there.add(first["rank"])
                self._log.write(
                    log_name(first["rank"]), f"rank {first['rank']} on {socket.gethostname()}, pid {first['pid']}"
                )

        def on_end() -> None:
            connection.close()
            if first.get("said") != "rank":
                return
            self._there.discard(first["rank"])
            if first["rank"] not in self._ended:
                self._rank_ended(first["rank"], None)

        self._listen(connection.fileno(), on_line, on_end)

    def _rank_said(self, first: Message, line: str) -> None:
        """A line of a connection that began with `first`: of the rank's output, or of what it tells this guard."""
        rank = first["rank"]
        if first["said"] == "rank":
            message = unpacked(line) or {}
            if message.get("said") == "ended":
                self._rank_ended(rank, message["code"])
            return
        self._tails.setdefault(rank, deque(maxlen=TAIL)).append(line)
        self._log.write(log_name(rank), line)
        if rank == 0:
            _say(said="out", text=line)

    def _rank_ended(self, rank: int, code: int | None) -> None:
        """`code` is None where the rank is gone without a word."""
        self._ended[rank] = -1 if code is None else code
        self._ended_at[rank] = time.monotonic()
        tail = [] if code == 0 else list(self._tails.get(rank, ()))
        why = self._why_gone(rank) if code is None else ""
        _say(said="rank", rank=rank, code=code, pid=self._pids.get(rank, 0), tail=tail, why=why)

    def _why_gone(self, rank: int) -> str:
        """What is known of the end of a rank that stated no reason; memory only where the kernel has counted such an
        end.
        """
        folder = self._spec.get("watchdog")
        if folder and (killed := why_killed(Path(folder), self._pids.get(rank, 0), self._began.get(rank, ""))):
            return f"by the watchdog, because {killed}"
        count = oom_kills() - self._oom_kills
        return f"the kernel has ended {count} processes of its host for want of memory meanwhile" if count > 0 else ""

    def _agent_said(self, line: str) -> None:
        self._agent_tail.append(line)
        self._log.write(f"agent-{socket.gethostname()}.log", line)
        for code, pid, other in _EXIT_CODE.findall(line):
            _say(said="exit_code", pid=int(pid or 0), code=int(code or other))

    def _told(self, line: str) -> None:
        self._heard = time.monotonic()
        do = (unpacked(line) or {}).get("do")
        if do == "interrupt":
            for pid in (pid for rank, pid in self._pids.items() if rank not in self._ended):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        elif do == "end":
            self._end()

    def _alone(self) -> None:
        """The launching program is gone or cannot be heard: nobody would ever end what runs here."""
        kill_tagged([self._mark])
        self._over = True

    def _leave(self, number: int, _: object) -> None:
        kill_tagged([self._mark])
        os._exit(128 + number)


class _LogFiles:
    """The output of ranks as files, written by a thread so that a slow disk holds up nobody; a full one loses lines
    here alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lines = folder, queue.SimpleQueue[tuple[str, str] | None]()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, name: str, line: str) -> None:
        self._lines.put((name, line))

    def close(self) -> None:
        """Wait for what is still to be written, for some seconds at most."""
        self._lines.put(None)
        self._thread.join(5)

    def _work(self) -> None:
        while (item := self._lines.get()) is not None:
            with contextlib.suppress(OSError):
                self._append(*item)

    def _append(self, name: str, line: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


_SPEAKING = threading.Lock()


def _say(**message: object) -> None:
    # Nobody hears it where ssh is gone; the silence on standard input is what ends this process.
    with contextlib.suppress(OSError), _SPEAKING:
        sys.stdout.buffer.write(packed(to=_word(), **message))
        sys.stdout.buffer.flush()


def _word() -> str:
    """What the launching program knows this guard's messages by: the last argument, which for `sweep` is a mark."""
    return sys.argv[-1]


def main() -> int:
    """Say what this host is, wait for what to start, and guard it."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if sys.argv[1:2] == ["sweep"]:
        _say(said="swept", left=kill_tagged(sys.argv[2:]))
        return 0
    # A line of its own, whatever a login shell has printed before without an end.
    sys.stdout.buffer.write(b"\n")
    _say(said="hello", info=asdict(gather_host_info(int(sys.argv[1]))))
    # Byte by byte: what follows the first order is read by the guard itself.
    with open(0, "rb", buffering=0, closefd=False) as told:
        while select.select([told], [], [], _GREETING_SECONDS)[0] and (line := told.readline()):
            message = unpacked(line.decode()) or {}
            if message.get("do") == "start":
                return Supervisor(message).run()
            if message.get("do") == "end":
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
