"""The watchdog of a rank: two threads that exchange heartbeats, find the ranks at fault, and end their own rank.

Rank zero reads the heartbeats of all ranks; the other ranks read the heartbeats of rank zero. A call of the store
blocks while the store's process is stopped or cut off, so one thread makes the calls, and the other judges their times.
"""

import faulthandler
import math
import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import NoReturn, TextIO

import torch.distributed as dist

from ds_finetune.cluster.watchdog.endings import RankProcess, RunEnding, beat, diagnose, join, names_of, status_lines
from ds_finetune.cluster.watchdog.progress import DONE, FAILING, HUNG, PREPARING, RUNNING, RankProgress, RankStatus
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE, FinetuneError, RunError
from ds_finetune.foreign.torch_distributed import flight_record, is_peer_lost
from ds_finetune.runs.folder import REPORT
from ds_finetune.runs.status import mark_ended, try_to_finish
from ds_finetune.system.processes import PauseDetector, began_at, has_ended, own_namespace
from ds_finetune.system.rank_files import ERROR_FILE, record_error
from ds_finetune.system.whole_file import replace_file
from ds_finetune.system.world import World

SILENT_SECONDS, PREPARING_SECONDS = 20.0, 600.0
"""A machine is lost after SILENT_SECONDS without a heartbeat, or after PREPARING_SECONDS while its ranks prepare data,
because native code may then hold Python's lock.
"""
_SILENT_LIMITS = {PREPARING: PREPARING_SECONDS}
ROUND_SECONDS = 5.0
"""Once a rank has hung or failed, a rank that sends no heartbeat for this number of seconds counts as silent."""
_LATE_SECONDS, _LATE_IN_SUM, _FEWEST_LATE, _NUM_BEATS = 0.5, 3.0, 3, 60
"""The watchdog blames packet loss if, of the last _NUM_BEATS heartbeats, at least _FEWEST_LATE took more than
_LATE_SECONDS each and more than _LATE_IN_SUM together. TCP resends a lost packet after 0.2 s, and after 0.6 s if it is
lost again. A busy processor delays fewer heartbeats.
"""
_GRACE_SECONDS = 2.0
"""Seconds that a rank has to end by itself once it knows that the run ends. Rank zero also waits this long: it
may serve the store, from which the other ranks read why the run ends.
"""
_LEAVING_SECONDS = 20.0
"""Seconds after which a failed rank is ended, because its cleanup may wait for ranks that no longer run."""
_TICK_SECONDS, _BEAT_SECONDS, _REPORT_SECONDS = 0.2, 1.0, 3.0
_MAX_LINES, _MAX_CHARACTERS, _STDERR = 50, 2_000, 2
CLOSED = "ended without a message: its process was killed by a signal, crashed in native code, or left by os._exit"
SILENT = "sends no heartbeats: its process was killed or is stopped, it holds Python's lock, or its host is cut off"


class StackFile:
    """The file `rank-00003.txt` with the Python stacks of a rank. On SIGQUIT the process appends its stacks."""

    def __init__(self, folder: Path, progress: RankProgress) -> None:
        self.path, self._progress = folder / f"rank-{progress.rank:05}.txt", progress
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)

    def write(self) -> None:
        """Append the rank's status, its last collectives and all stacks; with NCCL also write its flight recorder."""
        now, rank = datetime.now().astimezone().isoformat(timespec="seconds"), self._progress.rank
        calls = "".join(f"  {call}\n" for call in tuple(self._progress.collectives.last_calls))
        # ValueError: the training thread has closed the file.
        with suppress(ValueError):
            self._file.write(f"{now} rank {rank} {self._progress.status()}\n{calls}")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        if record := flight_record():
            self.path.with_name(f"nccl_trace_rank_{rank}").write_bytes(record)

    def close(self) -> None:
        """Stop writing, and remove the file if it is empty."""
        faulthandler.unregister(signal.SIGQUIT)
        self._file.close()
        # `rmdir` raises OSError, which is ignored, while the folder has files of other ranks.
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
            self.path.parent.rmdir()


def kill_process(process: RankProcess, why: str) -> None:
    """Kill a hung rank of this machine, after a signal that makes it write its stacks. `why` is recorded as its error.
    Nothing happens if another process has the process id by now.
    """
    if process.error_file and began_at(process.pid) == process.began:
        try_to_finish(lambda: record_error(f"killed by the watchdog: {why}", file=process.error_file))
    for number, seconds in ((signal.SIGCONT, 0.0), (signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):
        with suppress(OSError):
            if process.began and began_at(process.pid) == process.began:
                os.kill(process.pid, number)
                time.sleep(seconds)


class Monitor(threading.Thread):
    """The watchdog of this rank. It ends the rank's process when another rank fails or the run hangs."""

    def __init__(
        self, progress: RankProgress, processes: Sequence[RankProcess], store: dist.Store, output_dir: Path
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.progress = progress
        self.log: Say = say_nothing
        self._own, self._processes, self._report = processes[progress.rank], processes, output_dir / REPORT
        self._view = f", as seen from host {self._own.host}"
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined] # missing in the stubs of torch 2.13
        self._state, self._trouble, self._number = RUNNING, "", 0
        self._proposal: RunEnding | None = None
        self._stored_ending: RunEnding | None = None
        self._ending: RunEnding | None = None
        self._is_store_lost = self._is_failing = self._is_closing = self._is_busy = self._is_late_said = False
        self._answered_at = now = time.monotonic()
        self._heard_at = dict.fromkeys(range(len(processes)) if self._own.rank == 0 else [0], now)
        self._latest = dict.fromkeys(self._heard_at, RankStatus())
        self._beat_seconds: deque[float] = deque(maxlen=_NUM_BEATS)
        self._wake, self._ending_known, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._stacks: StackFile | None = None
        self._ends_at = self._trouble_at = self._compare_at = math.inf
        self._pauses, self._preparations, self._began = PauseDetector(), count(), time.time()
        self._dead_since: dict[int, int] = {}

    def run(self) -> None:
        """Send heartbeats and compare ranks until the monitor is closed."""
        heartbeats = threading.Thread(target=self._beat, name="watchdog-heartbeats", daemon=True)
        heartbeats.start()
        while not self._closed.wait(_TICK_SECONDS):
            self._exclude_pause()
            self._watch(time.monotonic())
        self._wake.set()
        heartbeats.join(_GRACE_SECONDS)

    def _beat(self) -> None:
        with suppress(dist.DistError):
            while not self._closed.is_set():
                self._exchange()
                began = time.monotonic()
                self._wake.wait(_BEAT_SECONDS)
                self._is_busy = time.monotonic() > began + _BEAT_SECONDS + _LATE_SECONDS
                self._wake.clear()
            return self._exchange()
        self._is_store_lost = True

    def _exchange(self) -> None:
        began, self._number = time.monotonic(), self._number + 1
        late = [seconds for seconds in tuple(self._beat_seconds) if seconds > _LATE_SECONDS]
        worst = max(late) if len(late) >= _FEWEST_LATE and sum(late) > _LATE_IN_SUM else 0.0
        status = replace(self.progress.status(), state=self._state, trouble=self._trouble)
        status = replace(status, number=self._number, late_seconds=worst)
        ending, statuses = beat(self._store, self._own.rank, status, self._proposal, self._heard_at)
        now = time.monotonic()
        for rank, latest in zip(self._heard_at, statuses, strict=True):
            if latest.number != self._latest[rank].number:
                self._latest[rank], self._heard_at[rank] = latest, now
        self._stored_ending = self._stored_ending or ending
        self._beat_seconds.append(0.0 if self._is_busy else now - began)
        self._answered_at = now

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error of the `with` block to the other ranks. If another rank caused it, a RunError that names that
        rank is raised instead.
        """
        try:
            yield
        except BaseException as error:
            if self._is_failing:
                raise
            failure, is_consequence = ending_by(error), is_peer_lost(error)
            cause = self._report_failure(failure, is_secondary=is_consequence)
            if cause is None or not is_consequence or self._own.rank in cause.at_fault:
                raise
            secondary = RunError(
                f"{cause.line}; rank {self._own.rank} then failed: {failure.line}",
                hint=f"read the report `{self._report}`",
            )
            # Every rank exits with the exit code of the cause, such as the code for a user's mistake.
            secondary.exit_code = cause.code or RUN_ERROR_EXIT_CODE
            record_error(secondary.message, cause=cause.line)
            # torchrun blames the rank that exits first, so the rank at fault must exit before this one.
            time.sleep(_GRACE_SECONDS)
            raise secondary from None

    @contextmanager
    def watch_from_start(self, store: dist.Store) -> Iterator[None]:
        """Wait for every rank without a time limit. Then, while the context is open, detect hangs and write stacks."""
        self.wait_until_prepared(store)
        with closing(StackFile(self._report.parent, self.progress)) as self._stacks, self.progress.during("start"):
            yield

    def wait_until_prepared(self, store: dist.Store) -> None:
        """Wait, without a limit, until every rank has called this method as often as this rank. If another rank fails,
        the monitor ends this process.
        """
        number = next(self._preparations)
        keys = [f"watchdog/prepared/{number}/{each.rank}" for each in self._processes]
        store.set(keys[self._own.rank], "")
        while True:
            with suppress(dist.DistStoreError):
                return store.wait(keys, timedelta(minutes=1))

    def close(self) -> None:
        """Announce that this rank is done, unless it has failed, and stop watching. Rank zero waits for every rank."""
        self._is_closing = True
        if not self._is_failing and self._ending is None:
            self._state = DONE
            while self._ending is None and any(rank and each.state != DONE for rank, each in self._latest.items()):
                self._wake.set()
                time.sleep(_TICK_SECONDS / 4)
        if self._own.rank == 0 and len(self._processes) > 1 and self._ending is not None:
            time.sleep(_GRACE_SECONDS)
        self._closed.set()
        self.join(_LEAVING_SECONDS)

    def _exclude_pause(self) -> None:
        if (pause := self._pauses.last_pause()) is None:
            return
        self.progress.exclude_pause(pause.monotonic_seconds)
        self._answered_at = now = time.monotonic()
        self._heard_at = dict.fromkeys(self._heard_at, now)
        self._beat_seconds.clear()
        self._ends_at += pause.monotonic_seconds
        self._trouble_at += pause.monotonic_seconds
        self._compare_at = math.inf
        if pause.is_of_process:
            self._warn(f"rank {self._own.rank} was paused for {pause.seconds:,.0f} s and runs again")

    def _warn(self, text: str) -> None:
        _print(f"watchdog: {text}\n")
        try_to_finish(lambda: self.log(f"watchdog: {text}"))

    def _watch(self, now: float) -> None:
        if self._ending is None and (ending := self._stored_ending or self._ending_without_store(now)) is not None:
            self._accept(ending)
        if self._ending is not None:
            if now > self._ends_at and not self._is_closing:
                self._leave(self._ending)
            return
        limit = self.progress.limit_seconds()
        if self._state == RUNNING and now > self.progress.last_progress_at() + limit:
            self._report_trouble(HUNG, f"  {self._own} has made no progress within its limit of {limit:,.0f} s")
        if self._own.rank == 0:
            self._compare(now)

    def _ending_without_store(self, now: float) -> RunEnding | None:
        """Why the run ends if the store's process is gone or cut off, or if rank zero, which compares ranks, hangs."""
        zero = self._processes[0]
        if self._is_closing:
            return None
        if self._is_store_lost:
            return RunEnding((0,), f"{zero}, or the launcher that serves its store, has ended without a message")
        is_hang = self._answered_at > max(self._heard_at[0], self._trouble_at) + 2 * ROUND_SECONDS
        if is_hang or now > self._answered_at + _SILENT_LIMITS.get(self.progress.phase, SILENT_SECONDS):
            return RunEnding((0,), f"{zero} {SILENT}{self._view}", is_hang=is_hang, is_silent=True)
        return None

    def _compare(self, now: float) -> None:
        active = {rank: status for rank, status in self._latest.items() if status.state != DONE}
        if not self._is_late_said and (late := self._late_text(active)):
            self._is_late_said = True
            self._warn(late)
        if dead := self._dead_ranks(active):
            self._propose(RunEnding(dead, f"{names_of(dead, self._processes)} {CLOSED}"))
        elif lost := self._lost_ranks(active, now):
            self._propose(RunEnding(lost, f"{names_of(lost, self._processes)} {SILENT}{self._view}"))
        elif not {HUNG, FAILING}.intersection(status.state for status in active.values()):
            self._compare_at = math.inf
        elif self._compare_at == math.inf:
            # The rank that caused this hang or error may still report an error of its own.
            self._compare_at = now + _GRACE_SECONDS
        elif now > self._compare_at + ROUND_SECONDS or all(self._heard_at[rank] > self._compare_at for rank in active):
            self._propose(self._diagnosed(active))

    def _dead_ranks(self, active: Mapping[int, RankStatus]) -> tuple[int, ...]:
        # A rank is dead two heartbeats after its process ended: its last status, perhaps DONE, has been read by then.
        for process in (self._processes[rank] for rank in active):
            if process.machine == self._own.machine and has_ended(process.pid, process.began):
                self._dead_since.setdefault(process.rank, self._number)
                self._wake.set()
        return tuple(rank for rank in active if self._number > self._dead_since.get(rank, self._number) + 1)

    def _lost_ranks(self, active: Mapping[int, RankStatus], now: float) -> tuple[int, ...]:
        excess: dict[str, float] = {}
        for rank, status in active.items():
            limit = _SILENT_LIMITS.get(status.phase, SILENT_SECONDS)
            machine, seconds = self._processes[rank].machine, now - self._heard_at[rank] - limit
            excess[machine] = min(seconds, excess.get(machine, math.inf))
        if max(excess.values(), default=0.0) <= 0:
            return ()
        # Machines that will reach the limit within ROUND_SECONDS are probably cut off by the same failure.
        return tuple(rank for rank in active if excess[self._processes[rank].machine] > -ROUND_SECONDS)

    def _late_text(self, statuses: Mapping[int, RankStatus]) -> str:
        # Heartbeats of ranks on this machine cross no network, and are late only if a rank is slow.
        far = {each.rank: each.host for each in self._processes if each.machine != self._own.machine}
        late = {rank: each.late_seconds for rank, each in statuses.items() if rank in far and each.late_seconds}
        hosts = " and ".join(f"host {host}" for host in sorted({far[rank] for rank in late}))
        worst = 0.0 if self._latest[0].late_seconds else max(late.values(), default=0.0)
        return f"heartbeats of {hosts} came late, by up to {worst:.1f} s: the network loses packets" if worst else ""

    def _diagnosed(self, statuses: Mapping[int, RankStatus]) -> RunEnding:
        silent = tuple(rank for rank in statuses if self._heard_at[rank] < self._compare_at)
        # A FAILING rank was in its last collective when the collective failed, so it counts as still inside.
        heard = {
            rank: replace(status, inside=status.last) if status.state == FAILING else status
            for rank, status in statuses.items()
            if rank not in silent
        }
        # Packet loss delays heartbeats less than a stopped rank does.
        is_stopped = any(self._heard_at[rank] < self._compare_at - 3 * ROUND_SECONDS for rank in silent)
        is_error = any(status.state == FAILING for status in statuses.values())
        late = "" if is_stopped else self._late_text(statuses)
        at_fault, why = ((), late) if late else (silent, SILENT) if silent else diagnose(heard)
        if is_error and not late and not at_fault:
            why += "; the connection between ranks broke, so the network is at fault"
        lines = [f"  {names_of(silent, self._processes)}: no heartbeat"] if silent else []
        lines += status_lines(self._processes, heard, at_fault)
        lines += [status.trouble for status in statuses.values() if status.trouble][:1]
        text = "\n".join([*lines, f"  stacks: {self._report.parent}/rank-*.txt"])
        line = f"{names_of(at_fault, self._processes) if at_fault else 'no single rank'}: {why}"
        return RunEnding(at_fault, line, text, is_hang=not is_error, is_silent=bool(silent) and not late)

    def _report_trouble(self, state: str, trouble: str) -> None:
        self._trouble_at = time.monotonic()
        self._trouble, self._state = trouble, state
        self._wake.set()

    def _propose(self, ending: RunEnding) -> None:
        self._proposal = ending
        self._wake.set()

    def _report_failure(self, failure: RunEnding, *, is_secondary: bool) -> RunEnding | None:
        self._is_failing = True
        wait = SILENT_SECONDS + ROUND_SECONDS if is_secondary else _REPORT_SECONDS
        self._ends_at = time.monotonic() + wait + _LEAVING_SECONDS
        if self._ending is None and is_secondary:
            self._report_trouble(FAILING, f"  {self._own} met {failure.line}\n{failure.text}")
        elif self._ending is None:
            line = f"{self._own} was the first to fail: {failure.line}"
            self._propose(replace(failure, at_fault=(self._own.rank,), line=line))
        self._ending_known.wait(wait)
        return self._ending

    def _accept(self, ending: RunEnding) -> None:
        if not self._is_failing:
            graces = (not ending.is_hang) + (self._own.rank == 0 and len(self._processes) > 1 and not ending.is_silent)
            self._ends_at = time.monotonic() + graces * _GRACE_SECONDS
        self._ending, is_mistake = ending, ending.code == USER_ERROR_EXIT_CODE
        if self._stacks is not None and not is_mistake:
            try_to_finish(self._stacks.write)
        if self._own.rank == 0 or self._is_reporter(ending) or ending is not self._stored_ending:
            mark_ended(self._report.parents[1], "hung" if ending.is_hang else "failed", ending.line)
            if not is_mistake:
                try_to_finish(lambda: self._write_report(ending))
        if self._is_reporter(ending) and not is_mistake:
            _print(f"watchdog: {ending.report}\n")
        self._ending_known.set()

    def _is_reporter(self, ending: RunEnding) -> bool:
        # The lowest rank that is not at fault prints the report.
        return self._own.rank == min({each.rank for each in self._processes}.difference(ending.at_fault), default=-1)

    def _write_report(self, ending: RunEnding) -> None:
        with suppress(OSError):
            is_written = self._report.exists() and self._report.stat().st_mtime > self._began
            # A rank that cannot reach the store does not replace another rank's report about this run.
            if ending is self._stored_ending or not is_written:
                self._report.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._report, ending.report + "\n")

    def _leave(self, ending: RunEnding) -> NoReturn:
        """End the process from the watchdog's thread, because the other threads may wait in a collective forever."""
        if self._is_reporter(ending) and ending.code == USER_ERROR_EXIT_CODE:
            _print(f"watchdog: {ending.report}\n")
        beside = [each for each in self._processes if each.machine == self._own.machine]
        silent = [each for each in beside if ending.is_silent and each.rank in ending.at_fault]
        if self._own == next((each for each in beside if each not in silent), None):
            for each in silent:
                kill_process(each, ending.line)
        if ending.is_silent:
            # A launcher that sees this rank exit may end silent ranks, whose stacks are still being written.
            time.sleep(_GRACE_SECONDS)
        if self._stacks is not None and ending.code == USER_ERROR_EXIT_CODE:
            self._stacks.close()
        try_to_finish(lambda: record_error(ending.line, cause=ending.line))
        os._exit(ending.code or RUN_ERROR_EXIT_CODE)


@contextmanager
def start_monitor(progress: RankProgress, world: World, store: dist.Store, output_dir: Path) -> Iterator[Monitor]:
    """Run the watchdog of this rank while the context is open. Every rank opens it with the store of the run."""
    host, pid = socket.gethostname(), os.getpid()
    machine = f"{host} {own_namespace('pid')} {own_namespace('net')}"
    own = RankProcess(world.rank, host, pid, began_at(pid), machine, os.environ.get(ERROR_FILE, ""))
    monitor = Monitor(progress, join(store, world, own), store, output_dir)
    monitor.start()
    try:
        with monitor.report_errors():
            yield monitor
    finally:
        monitor.close()


def ending_by(error: BaseException) -> RunEnding:
    """Describe `error` as a RunEnding without ranks at fault: the first line of the error, its traceback or hint, and
    its exit code.
    """
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", RUN_ERROR_EXIT_CODE)
    text = str(error) if isinstance(error, FinetuneError) else "".join(traceback.format_exception(error))
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    lines = [line[:_MAX_CHARACTERS] for line in (first, *text.splitlines()[-_MAX_LINES:])]
    # The error may quote a file name that is not UTF-8, which cannot be sent as JSON.
    line, *lines = (line.encode(errors="backslashreplace").decode() for line in lines)
    exit_code = code if isinstance(code, int) else RUN_ERROR_EXIT_CODE
    return RunEnding((), f"{type(error).__name__}: {line}", "\n".join(lines), exit_code)


def _print(text: str) -> None:
    # The training thread may hold the lock of `sys.stderr`. A full disk or a closed pipe must not stop this thread.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
