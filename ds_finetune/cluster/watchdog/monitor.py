"""The watchdog of a rank: two threads that exchange heartbeats, find the ranks at fault, and end their own rank.

Rank zero reads the heartbeats of all ranks; other ranks read that of rank zero. So reads grow linearly with the number
of ranks. A call of the store blocks while its server is stopped or cut off. Therefore a thread with its own connection
to the store makes the calls, and the other thread judges how long they take.
"""

import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ds_finetune.cluster.watchdog.diagnosis import diagnose, names_of, status_lines
from ds_finetune.cluster.watchdog.messages import (
    ENDING,
    ENDING_JSON,
    NONE,
    STATUS_JSON,
    RankProcess,
    RunEnding,
    heartbeat_key,
    join,
)
from ds_finetune.cluster.watchdog.progress import DONE, FAILING, HUNG, PREPARING, RUNNING, RankProgress, RankStatus
from ds_finetune.cluster.watchdog.stacks import StackFile, kill_process
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE, FinetuneError, RunError
from ds_finetune.runs.folder import REPORT
from ds_finetune.runs.status import mark_ended, try_to_finish
from ds_finetune.system.processes import PauseDetector, has_ended, oom_kills
from ds_finetune.system.rank_files import record_error
from ds_finetune.system.whole_file import replace_file
from ds_finetune.system.world import World

SILENT_SECONDS, PREPARING_SECONDS = 25.0, 600.0
"""A machine counts as lost after SILENT_SECONDS without a heartbeat: its network, its power or all its ranks are gone.
While ranks prepare data the limit is PREPARING_SECONDS, because native code may hold the GIL.
"""
ROUND_SECONDS = 5.0
"""Once a rank has hung or failed, a rank that sends no heartbeat for this number of seconds counts as silent."""
_STOPPED_SECONDS = 15.0
"""A rank without a heartbeat for this many seconds is at fault, even on a network that delays heartbeats."""
_LATE_SECONDS, _LATE_WITHIN, _LATE_IN_SUM, _FEWEST_LATE = 0.5, 60.0, 3.0, 3
"""Limits by which a network that loses packets is told from a busy processor. TCP resends a lost packet after 0.2 s,
and after 0.6 s if it is lost again. A heartbeat is late if it takes more than _LATE_SECONDS, instead of milliseconds.
The network is at fault if at least _FEWEST_LATE late heartbeats within _LATE_WITHIN s took more than _LATE_IN_SUM s in
sum. A busy processor delays fewer.
"""
_GRACE_SECONDS = 2.0
"""Seconds that a rank has to end by itself once it knows that the run ends. Rank zero, whose process may serve the
store, waits as long, so that the other ranks can read why the run ends.
"""
_LEAVING_SECONDS = 20.0
"""Seconds after which a failed rank is ended, because its cleanup may wait for ranks that no longer run."""
_TICK_SECONDS, _BEAT_SECONDS, _PREPARED_WAIT, _REPORT_SECONDS = 0.2, 1.0, timedelta(minutes=1), 3.0
_MAX_LINES, _MAX_CHARACTERS = 50, 2_000
_STDERR = 2
_PEER_LOST_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")
"""Words in the errors that torch raises on a rank when another rank has exited (torch 2.13: RuntimeError from gloo,
DistBackendError from NCCL).
"""
CLOSED = "ended without a message: its process was killed by a signal, crashed in native code, or left by os._exit"
SILENT = "sends no heartbeats: its process was killed or is stopped, it holds Python's lock, or its host is cut off"


class Monitor(threading.Thread):
    """The watchdog of this rank. It ends the rank's process when another rank fails or the run hangs."""

    def __init__(
        self, progress: RankProgress, processes: Sequence[RankProcess], store: dist.Store, output_dir: Path
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.progress = progress
        self.log: Say = say_nothing
        """Function that adds a line to the log of the run."""
        self._own, self._processes, self._report = processes[progress.rank], processes, output_dir / REPORT
        # torch 2.13's type stubs lack the method `clone`.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._state, self._trouble = RUNNING, ""
        self._proposal: RunEnding | None = None
        """The reason (RunEnding) that this rank proposes for ending the run. The first proposal of all ranks counts."""
        self._stored_ending: RunEnding | None = None
        self._is_store_lost = False
        self._answered_at = now = time.monotonic()
        self._heard_at = dict.fromkeys(range(len(processes)) if self._own.rank == 0 else [0], now)
        """Maps each watched rank to the monotonic time at which its last heartbeat was read."""
        self._latest = dict.fromkeys(self._heard_at, RankStatus())
        """The last heartbeat of each watched rank."""
        self._late: deque[tuple[float, float]] = deque(maxlen=round(_LATE_WITHIN))
        self._number, self._overslept, self._wake = 0, False, threading.Event()
        self._stacks: StackFile | None = None
        self._ending: RunEnding | None = None
        self._ending_known, self._closed = threading.Event(), threading.Event()
        self._is_failing = self._is_closing = False
        self._ends_at = self._trouble_at = self._compare_at = math.inf
        self._pauses, self._preparations, self._began = PauseDetector(), count(), time.time()
        self._oom_kills = oom_kills()
        self._dead: dict[int, int] = {}
        """Maps each rank whose process has ended to the number of the exchange of heartbeats at which this was noticed.
        """

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
        """Exchange heartbeats through the store until the monitor is closed, and then once more. Stop if the process of
        the store ends.
        """
        is_last = False
        with suppress(dist.DistError):
            while not is_last:
                is_last = self._closed.is_set()
                self._exchange()
                began = time.monotonic()
                self._wake.wait(0.0 if is_last else _BEAT_SECONDS)
                self._overslept = time.monotonic() > began + _BEAT_SECONDS + _LATE_SECONDS
                self._wake.clear()
        self._is_store_lost = not is_last

    def _exchange(self) -> None:
        began, self._number = time.monotonic(), self._number + 1
        late = [seconds for at, seconds in self._late if at > began - _LATE_WITHIN]
        worst = max(late) if len(late) >= _FEWEST_LATE and sum(late) > _LATE_IN_SUM else 0.0
        status = replace(self.progress.status(), state=self._state, trouble=self._trouble)
        status = replace(status, number=self._number, late_seconds=worst)
        self._store.set(heartbeat_key(self._own.rank), STATUS_JSON.dump_json(status).decode())
        if self._proposal is not None:
            self._store.compare_set(ENDING, NONE, ENDING_JSON.dump_json(self._proposal).decode())
        ending, *texts = self._store.multi_get([ENDING, *map(heartbeat_key, self._heard_at)])
        now = time.monotonic()
        for rank, text in zip(self._heard_at, texts, strict=True):
            if (latest := STATUS_JSON.validate_json(text)).number != self._latest[rank].number:
                self._latest[rank], self._heard_at[rank] = latest, now
        if self._stored_ending is None and ending != NONE.encode():
            self._stored_ending = ENDING_JSON.validate_json(ending)
        if now > began + _LATE_SECONDS and not self._overslept:
            self._late.append((now, now - began))
        self._answered_at = now

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error that is raised in the `with` block to the other ranks at once.

        If another rank's failure caused the error, a RunError that names that rank is raised instead.
        """
        try:
            yield
        except BaseException as error:
            if self._is_failing:
                raise
            failure, is_consequence = ending_by(error), is_secondary(error)
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
            # torchrun reports the rank that exits first as the cause, so the rank at fault must exit before this
            # one.
            time.sleep(_GRACE_SECONDS)
            raise secondary from None

    @contextmanager
    def watch_from_start(self, store: dist.Store) -> Iterator[None]:
        """Wait for every rank without a time limit. Then, while the context is open, detect hangs and write stacks."""
        self.wait_until_prepared(store)
        with closing(StackFile(self._report.parent, self.progress)) as self._stacks, self.progress.during("start"):
            yield

    def wait_until_prepared(self, store: dist.Store) -> None:
        """Wait, without a limit, until every rank has called this method as often as this rank.

        Rank zero prints each minute which ranks are missing. If another rank fails, the monitor ends this process.
        """
        number = next(self._preparations)
        keys = [f"watchdog/prepared/{number}/{each.rank}" for each in self._processes]
        store.set(keys[self._own.rank], "")
        while True:
            try:
                return store.wait(keys, _PREPARED_WAIT)
            except dist.DistStoreError:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                if missing and self._own.rank == 0:
                    _print(f"watchdog: still preparing: {names_of(missing, self._processes)}\n")

    def close(self) -> None:
        """Announce that this rank is done, unless it has failed, and stop watching. Rank zero first waits until every
        rank is done.
        """
        self._is_closing = True
        if not self._is_failing and self._ending is None:
            self._state = DONE
            others = self._processes[1:] if self._own.rank == 0 else []
            while self._ending is None and any(self._latest[each.rank].state != DONE for each in others):
                self._wake.set()
                time.sleep(_TICK_SECONDS / 4)
        self._let_others_read()
        self._closed.set()
        self.join(_LEAVING_SECONDS)

    def _let_others_read(self) -> None:
        if self._own.rank == 0 and len(self._processes) > 1 and self._ending is not None:
            time.sleep(_GRACE_SECONDS)

    def _exclude_pause(self) -> None:
        if (pause := self._pauses.last_pause()) is None:
            return
        self.progress.exclude_pause(pause.monotonic_seconds)
        self._answered_at = now = time.monotonic()
        self._heard_at = dict.fromkeys(self._heard_at, now)
        self._late.clear()
        self._ends_at += pause.monotonic_seconds
        self._trouble_at += pause.monotonic_seconds
        self._compare_at = math.inf
        if pause.is_of_process:
            line = f"watchdog: rank {self._own.rank} was paused for {pause.seconds:,.0f} s and runs again"
            _print(f"{line}\n")
            try_to_finish(lambda: self.log(line))

    def _watch(self, now: float) -> None:
        if self._stacks is not None:
            self._stacks.arm(self.progress.longest_step)
        if self._ending is None and (ending := self._stored_ending or self._ending_without_store(now)) is not None:
            self._accept(ending)
        if self._ending is not None:
            if now > self._ends_at and not self._is_closing:
                self._leave(self._ending)
            return
        limit, seconds = self.progress.limit_seconds(), now - self.progress.last_progress_at()
        if seconds > limit and self._state == RUNNING:
            why = f"has made no progress for {seconds:,.0f} s, and its limit is {limit:,.0f} s"
            self._report_trouble(HUNG, f"  {self._own} {why}")
        if self._own.rank == 0:
            self._compare(now)

    def _ending_without_store(self, now: float) -> RunEnding | None:
        """The reason for ending the run if the process of the store is gone or cut off, or if rank zero, which decides
        when to end, hangs; else None.
        """
        zero, silent = self._processes[0], now - self._answered_at
        if self._is_closing:
            return None
        if self._is_store_lost:
            return RunEnding((0,), f"{zero}, or the launcher that serves its store, has ended without a message")
        if self._answered_at > max(self._heard_at[0], self._trouble_at) + 2 * ROUND_SECONDS:
            return RunEnding((0,), f"{zero} {SILENT}", is_hang=True, is_silent=True)
        if silent > _silent_limit(self.progress.phase):
            why = f"it is stopped, or its host or this one, {self._own.host}, is cut off"
            return RunEnding((0,), f"{zero} has not answered for {silent:.0f} s: {why}", is_silent=True)
        return None

    def _compare(self, now: float) -> None:
        """End the run, as rank zero, if a rank or a machine is gone, or soon after a rank has hung or failed."""
        heard_at = self._heard_at
        active = {rank: status for rank, status in self._latest.items() if status.state != DONE}
        excess: dict[str, float] = {}
        for rank, status in active.items():
            machine, seconds = self._processes[rank].machine, now - heard_at[rank] - _silent_limit(status.phase)
            excess[machine] = min(seconds, excess.get(machine, math.inf))
        for process in (self._processes[rank] for rank in active):
            if process.machine == self._own.machine and has_ended(process.pid, process.began):
                self._dead.setdefault(process.rank, self._number)
                self._wake.set()
        # A rank writes that it is done before its process ends. Two exchanges of heartbeats later this status has been
        # read, so a rank without it has failed.
        if dead := [rank for rank in active if self._number > self._dead.get(rank, self._number) + 1]:
            line = f"{names_of(dead, self._processes)} {CLOSED}"
            if (kills := oom_kills() - self._oom_kills) > 0:
                line += f"; the kernel has killed {kills} processes of its host for lack of memory since the start"
            self._propose(RunEnding(tuple(dead), line))
        elif max(excess.values(), default=0.0) > 0:
            # Machines that have been silent for almost as long have probably lost the same network, so they are named
            # too.
            silent = [rank for rank in active if excess[self._processes[rank].machine] > -ROUND_SECONDS]
            line = f"{names_of(silent, self._processes)} {SILENT}, as seen from rank 0 (host {self._own.host})"
            self._propose(RunEnding(tuple(silent), line))
        elif not {HUNG, FAILING}.intersection(status.state for status in active.values()):
            self._compare_at = math.inf
        elif self._compare_at == math.inf:
            # An error of another rank may have caused the reported one. That rank may report it within _GRACE_SECONDS.
            self._compare_at = now + _GRACE_SECONDS
        elif now > self._compare_at + ROUND_SECONDS or all(heard_at[rank] > self._compare_at for rank in active):
            self._propose(self._diagnosed(active))

    def _diagnosed(self, statuses: Mapping[int, RankStatus]) -> RunEnding:
        """The reason for ending a run in which a rank has hung or failed.

        The network is blamed if heartbeats came late. Otherwise ranks without heartbeats are blamed, and otherwise
        ranks that differ from the others.
        """
        heard_at, compare_at = self._heard_at, self._compare_at
        at_fault: Sequence[int] = ()
        silent = [rank for rank in statuses if heard_at[rank] < compare_at]
        # A rank that reports an error was in its last collective when that collective failed, so it counts as still
        # inside.
        heard = {
            rank: replace(status, inside=status.last) if status.state == FAILING else status
            for rank, status in statuses.items()
            if rank not in silent
        }
        # Lost packets delay heartbeats; only a rank that is stopped or dead sends none for so long.
        is_stopped = any(heard_at[rank] < compare_at - _STOPPED_SECONDS for rank in silent)
        # Ranks on this machine are left out: their heartbeats cross no network and are late only if a rank is slow.
        far = {rank for rank in statuses if self._processes[rank].machine != self._own.machine}
        late = {rank: statuses[rank].late_seconds for rank in far if statuses[rank].late_seconds}
        is_network = bool(late) and not is_stopped and not self._latest[0].late_seconds
        is_error = any(status.state == FAILING for status in statuses.values())
        if is_network:
            hosts = " and ".join(sorted({f"host {self._processes[rank].host}" for rank in late}))
            why = f"heartbeats came late from {hosts} (up to {max(late.values()):.1f} s): the network loses packets"
        elif silent:
            at_fault, why = silent, SILENT
        else:
            at_fault, why = diagnose(heard)
            if is_error and not at_fault:
                why += "; the connection between ranks broke, so the network is at fault"
        lines = [f"  {names_of(silent, self._processes)}: no heartbeat"] if silent else []
        lines += status_lines(self._processes, heard, at_fault)
        lines += [status.trouble for status in statuses.values() if status.trouble][:1]
        text = "\n".join([*lines, f"  stacks: {self._report.parent}/rank-*.txt"])
        line = f"{names_of(at_fault, self._processes) if at_fault else 'no single rank'}: {why}"
        is_silent = bool(silent) and not is_network
        return RunEnding(tuple(at_fault), line, text, is_hang=not is_error, is_silent=is_silent)

    def _report_trouble(self, state: str, trouble: str) -> None:
        """Report that this rank has hung or failed, so that rank zero compares all ranks."""
        self._trouble_at = time.monotonic()
        self._trouble, self._state = trouble, state
        self._wake.set()

    def _propose(self, ending: RunEnding) -> None:
        self._proposal = ending
        self._wake.set()

    def _report_failure(self, failure: RunEnding, *, is_secondary: bool) -> RunEnding | None:
        """Report a failure of this rank to the others; returns why the run ends, or None if unknown in time."""
        self._is_failing = True
        wait = SILENT_SECONDS + ROUND_SECONDS if is_secondary else _REPORT_SECONDS
        self._ends_at = time.monotonic() + wait + _LEAVING_SECONDS
        if self._ending is None and is_secondary:
            self._write_stacks()
            self._report_trouble(FAILING, f"  {self._own} met {failure.line}\n{failure.text}")
        elif self._ending is None:
            line = f"{self._own} was the first to fail: {failure.line}"
            self._propose(replace(failure, at_fault=(self._own.rank,), line=line))
        self._ending_known.wait(wait)
        return self._ending

    def _accept(self, ending: RunEnding) -> None:
        if not self._is_failing:
            self._ends_at = time.monotonic() + (0.0 if ending.is_hang else _GRACE_SECONDS)
        if ending.is_hang:
            # Stacks are written now: a collective of this rank may raise an error once other ranks leave, which would
            # change its stacks.
            self._write_stacks()
        self._ending = ending
        if self._own.rank == 0 or self._is_reporter(ending) or ending is not self._stored_ending:
            mark_ended(self._report.parents[1], "hung" if ending.is_hang else "failed", ending.line)
            if ending.code != USER_ERROR_EXIT_CODE:
                try_to_finish(lambda: self._write_report(ending))
        if self._is_reporter(ending) and ending.code != USER_ERROR_EXIT_CODE:
            # The report is printed now, because the training thread may fail and end the process before `_leave` runs.
            _print(f"watchdog: {ending.report}\n")
        self._ending_known.set()

    def _is_reporter(self, ending: RunEnding) -> bool:
        """Whether this rank prints the report: the lowest rank that is not at fault does."""
        return self._own.rank == min({each.rank for each in self._processes}.difference(ending.at_fault), default=-1)

    def _write_report(self, ending: RunEnding) -> None:
        with suppress(OSError):
            is_written = self._report.exists() and self._report.stat().st_mtime > self._began
            # A rank that cannot reach the store does not replace the report that another rank has written about this
            # run.
            if ending is self._stored_ending or not is_written:
                self._report.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._report, ending.report + "\n")

    def _leave(self, ending: RunEnding) -> NoReturn:
        """End the process from the watchdog's thread, because the other threads may wait in a collective forever."""
        silent = ending.at_fault if ending.is_silent else ()
        beside = [each for each in self._processes if each.machine == self._own.machine]
        is_first = not any(each.rank < self._own.rank and each.rank not in silent for each in beside)
        if self._is_reporter(ending) and ending.code == USER_ERROR_EXIT_CODE:
            _print(f"watchdog: {ending.report}\n")
        elif is_first and not self._is_reporter(ending):
            _print(f"watchdog: rank {self._own.rank} ends: {ending.line}\n")
        for each in beside if is_first else ():
            if each.rank in silent and each != self._own:
                kill_process(each, ending.line)
        if ending.code == USER_ERROR_EXIT_CODE and self._stacks is not None:
            self._stacks.close()
        elif not ending.is_hang:
            self._write_stacks()
        if silent:
            # Wait before this rank exits: a launcher that sees the exit may end other ranks while they write stacks of
            # the silent ones.
            time.sleep(1.5)
        self._let_others_read()
        try_to_finish(lambda: record_error(ending.line, cause=ending.line))
        os._exit(ending.code or RUN_ERROR_EXIT_CODE)

    def _write_stacks(self) -> None:
        if self._stacks is not None:
            try_to_finish(self._stacks.write)


def _silent_limit(phase: str) -> float:
    return PREPARING_SECONDS if phase == PREPARING else SILENT_SECONDS


@contextmanager
def start_monitor(progress: RankProgress, world: World, store: dist.Store, output_dir: Path) -> Iterator[Monitor]:
    """Run the watchdog of this rank while the context is open. Every rank opens it with the store of the run."""
    monitor = Monitor(progress, join(store, world, RankProcess.here(world.rank)), store, output_dir)
    monitor.start()
    try:
        with monitor.report_errors():
            yield monitor
    finally:
        monitor.close()


def ending_by(error: BaseException) -> RunEnding:
    """Describe `error` as a RunEnding with the first line of the error, the end of its traceback and its exit code. It
    names no rank at fault.
    """
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", RUN_ERROR_EXIT_CODE)
    is_ours = isinstance(error, FinetuneError)
    lines = (str(error) if is_ours else "".join(traceback.format_exception(error))).splitlines()[-_MAX_LINES:]
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    # The error may quote a file name that is not UTF-8, which cannot be sent as JSON.
    line, *lines = (text[:_MAX_CHARACTERS].encode(errors="backslashreplace").decode() for text in (first, *lines))
    exit_code = code if isinstance(code, int) else RUN_ERROR_EXIT_CODE
    return RunEnding((), f"{type(error).__name__}: {line}", "\n".join(lines), exit_code)


def is_secondary(error: BaseException) -> bool:
    """Whether torch raises errors like `error` when another rank has exited, which may then be the cause."""
    if isinstance(error, FinetuneError):
        return False
    names_peer = isinstance(error, RuntimeError) and any(word in str(error) for word in _PEER_LOST_WORDS)
    return isinstance(error, dist.DistError) or names_peer


def _print(text: str) -> None:
    """Write text to the file descriptor of standard error. `sys.stderr` is not used, because the training thread may
    hold its lock.
    """
    # A full disk or a closed pipe must not stop this thread, because it has to end the run.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
