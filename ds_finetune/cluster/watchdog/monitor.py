"""The watchdog of a rank: a thread that compares heartbeats, finds the ranks at fault, and ends its own rank."""

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ds_finetune.cluster.watchdog.diagnosis import SILENT, diagnose, hosts_text, status_lines
from ds_finetune.cluster.watchdog.failure import ending_by, is_secondary
from ds_finetune.cluster.watchdog.heartbeats import (
    DONE,
    ENDED,
    FAILING,
    HUNG,
    RUNNING,
    Heartbeats,
    RankProcess,
    RunEnding,
    join,
)
from ds_finetune.cluster.watchdog.progress import PREPARING, RankProgress, RankStatus
from ds_finetune.cluster.watchdog.stacks import StackFile, kill_process
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE, RunError
from ds_finetune.runs.folder import REPORT
from ds_finetune.runs.status import mark_ended, try_to_finish
from ds_finetune.system.error_file import record_error
from ds_finetune.system.processes import PauseDetector, has_ended, oom_kills
from ds_finetune.system.whole_file import replace_file
from ds_finetune.system.world import World

SILENT_SECONDS, PREPARING_SECONDS = 30.0, 600.0
"""Seconds without a heartbeat after which a machine counts as lost: its network, its power or all its ranks are gone.
The limit is longer while ranks prepare, since native code that prepares data may hold the GIL.
"""
ROUND_SECONDS = 5.0
"""How long heartbeats may take to arrive once a rank has hung or failed; a rank without one then counts as silent."""
_STOPPED_SECONDS = 15.0
"""A rank that has sent no heartbeat for so long is at fault, even if earlier heartbeats came late."""
_GRACE_SECONDS = 2.0
"""How long a rank with an error that another rank may have caused waits for that cause; how long a rank that learns of
the end of the run has to end by itself.
"""
_LEAVING_SECONDS = 20.0
"""How long a failed rank has to end: its cleanup may wait for ranks that have ended."""
_FLUSH_SECONDS, _TICK_SECONDS, _PREPARED_WAIT = 3.0, 0.2, timedelta(minutes=1)
_MAX_NAMED_RANKS = 16
_STDERR = 2
CLOSED = "ended without a message: its process was killed by a signal, crashed in native code, or left by os._exit"
UNREACHABLE = "sends no heartbeats: its process was killed or is stopped, or its host is down or cut off"


class Monitor(threading.Thread):
    """Compares this rank with others, and ends its process when another rank fails or the run hangs."""

    def __init__(
        self, progress: RankProgress, processes: Sequence[RankProcess], store: dist.Store, output_dir: Path
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.progress = progress
        self.log: Say = say_nothing
        """Adds a line to the run's log."""
        self._own, self._processes, self._report = processes[progress.rank], processes, output_dir / REPORT
        self._neighbours = [each for each in processes if each.is_beside(self._own)]
        watched = processes if self._own.rank == 0 else [processes[0], *self._neighbours]
        self._beats = Heartbeats(store, self._own.rank, [each.rank for each in watched], progress.status)
        self._stacks: StackFile | None = None
        self._ending: RunEnding | None = None
        self._ending_known, self._closed = threading.Event(), threading.Event()
        self._is_failing = self._is_closing = False
        self._ends_at = self._trouble_at = self._compare_at = math.inf
        self._pauses, self._oom_kills, self._began = PauseDetector(), oom_kills(), time.time()

    def run(self) -> None:
        """Send heartbeats and compare ranks until closed."""
        self._beats.start()
        while not self._closed.wait(_TICK_SECONDS):
            self._exclude_pause()
            self._watch(time.monotonic())

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error raised inside to the other ranks at once.

        If another rank's failure caused the error, raise a RunError that names that rank instead.
        """
        try:
            yield
        except BaseException as error:
            if self._is_failing:
                raise
            cause = self._report_failure(failure := ending_by(error), is_secondary=is_secondary(error))
            if cause is None:
                raise
            secondary = RunError(
                f"{cause.line}; rank {self._own.rank} then met {failure.line}", hint=f"see {self._report} for more"
            )
            record_error(secondary.message, cause=cause.line)
            # torchrun reports the rank that exits first as the cause, so let the other rank exit first.
            time.sleep(_GRACE_SECONDS)
            # Every rank exits with the same code, e.g. the one for a user's mistake.
            secondary.exit_code = cause.code or RUN_ERROR_EXIT_CODE
            raise secondary from None

    @contextmanager
    def watch_from_start(self, store: dist.Store) -> Iterator[None]:
        """Wait for every rank, without a time limit; then, while open, detect hangs and write stacks."""
        self.wait_until_prepared(store)
        self._stacks = stacks = StackFile(self._report.parent, self._own.rank)
        try:
            with self.progress.during("start"):
                yield
        finally:
            self._stacks = None
            stacks.close()

    def wait_until_prepared(self, store: dist.Store, what: str = "run") -> None:
        """Wait, without a limit, until every rank has prepared `what`; rank zero prints each minute which have not.

        If another rank fails meanwhile, the monitor's thread ends the process.
        """
        keys = [f"watchdog/prepared/{what}/{each.rank}" for each in self._processes]
        store.set(keys[self._own.rank], "")
        while True:
            try:
                return store.wait(keys, _PREPARED_WAIT)
            except dist.DistStoreError:
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])][:_MAX_NAMED_RANKS]
                if missing and self._own.rank == 0:
                    _print(f"watchdog: ranks {', '.join(missing)} are still preparing\n")

    def close(self) -> None:
        """Announce that this rank is done, unless it has failed, and stop; rank zero waits until every rank is done."""
        self._is_closing = True
        if not self._is_failing and self._ending is None:
            self._beats.state = DONE
        self._beats.flush(_FLUSH_SECONDS)
        self._wait_for_others(math.inf if self._beats.state == DONE else ROUND_SECONDS)
        self._closed.set()
        self.join(_LEAVING_SECONDS)
        self._beats.close()

    def _wait_for_others(self, seconds: float) -> None:
        """On rank zero, which may serve the store: wait until every other rank is done or knows why the run ends."""
        began = time.monotonic()
        while self._own.rank == 0 and (now := time.monotonic()) < began + seconds:
            waited = [each.rank for each in self._processes[1:] if not self._has_left(each.rank)]
            if self._ending is not None:
                seconds = min(seconds, now - began + ROUND_SECONDS)
                waited = [rank for rank in waited if now < self._beats.heard_at[rank] + _GRACE_SECONDS]
            if not waited:
                return
            self._beats.flush(_FLUSH_SECONDS)
            time.sleep(_TICK_SECONDS / 4)

    def _has_left(self, rank: int) -> bool:
        return self._beats.state_of(rank) in (DONE, ENDED)

    def _exclude_pause(self) -> None:
        """If this process was paused since the last call, print that, and let no time limit count the pause."""
        pause = self._pauses.last_pause()
        if pause is None:
            return
        self.progress.exclude_pause(pause.monotonic_seconds)
        self._beats.forget_pause()
        self._ends_at += pause.monotonic_seconds
        self._trouble_at += pause.monotonic_seconds
        self._compare_at = math.inf
        if pause.is_of_process:
            line = f"watchdog: rank {self._own.rank} was paused for {pause.seconds:,.0f} s and runs again"
            _print(f"{line}\n")
            try_to_finish(lambda: self.log(line))

    def _watch(self, now: float) -> None:
        if (stacks := self._stacks) is not None:
            stacks.arm(self.progress.longest_step)
        ending = self._beats.ending or (None if self._is_closing else self._ending_without_store(now))
        if self._ending is None and ending is not None:
            self._accept(ending)
        if self._ending is not None:
            if now > self._ends_at and not self._is_closing:
                self._leave(self._ending)
            return
        if self._beats.state in (PREPARING, RUNNING):
            self._beats.state = PREPARING if self.progress.phase == PREPARING else RUNNING
            limit, seconds = self.progress.limit_seconds(), now - self.progress.last_progress_at()
            if seconds > limit:
                why = f"has made no progress for {seconds:,.0f} s, and its limit is {limit:,.0f} s"
                self._report_trouble(HUNG, f"  rank {self._own.rank} {why}")
        self._look_for_deaths()
        if self._own.rank == 0:
            self._compare(now)

    def _look_for_deaths(self) -> None:
        """End the run if the process of another rank on this machine has ended and the store has no reason for it."""
        for each in self._neighbours:
            if self._has_left(each.rank) or not has_ended(each.pid, each.began):
                continue
            # The process may have sent its reason just before it ended.
            self._beats.flush(_FLUSH_SECONDS)
            if not self._has_left(each.rank) and self._beats.ending is None:
                count = oom_kills() - self._oom_kills
                text = f"; the kernel has killed {count} processes of its machine for lack of memory since the start"
                self._propose(RunEnding((each.rank,), f"{each} {CLOSED}{text if count > 0 else ''}"))

    def _ending_without_store(self, now: float) -> RunEnding | None:
        """The run's ending if rank zero, or the process that serves the store, is dead, stuck or cut off."""
        zero, answered_at, silent = self._processes[0], self._beats.answered_at, now - self._beats.answered_at
        # Over a network that loses packets, rank zero's answer may come late.
        is_heard = self._own.is_beside(zero) or answered_at > self._trouble_at + ROUND_SECONDS
        if self._beats.is_lost:
            why = CLOSED if self._own.rank else "has lost the store, because the launcher that served it has ended"
        elif self._own.rank and is_heard and now > self._trouble_at + 2 * ROUND_SECONDS:
            why = SILENT if self._own.is_beside(zero) else UNREACHABLE
        elif silent > _silent_limit(self._beats.state):
            why = f"has not answered for {silent:.0f} s: its host or this one, {self._own.host}, is down or cut off"
        else:
            return None
        is_hang = why == SILENT
        return RunEnding((0,), f"{zero} {why}", is_hang=is_hang, silent=(0,) if is_hang else ())

    def _compare(self, now: float) -> None:
        """On rank zero: end the run if a machine is silent, or soon after a rank has hung or failed."""
        active = [each for each in self._processes if not self._has_left(each.rank)]
        heard_at, states = self._beats.heard_at, {each.rank: self._beats.state_of(each.rank) for each in active}
        excess: dict[str, float] = {}
        for each in active:
            seconds = now - heard_at[each.rank] - _silent_limit(states[each.rank])
            excess[each.machine] = min(seconds, excess.get(each.machine, math.inf))
        if max(excess.values(), default=0.0) > 0:
            # Machines that are almost over the limit have lost the same network.
            self._end_silent([each for each in active if excess[each.machine] > -ROUND_SECONDS])
        elif not {HUNG, FAILING}.intersection(states.values()):
            self._compare_at = math.inf
        elif self._compare_at == math.inf:
            self._compare_at = now + (0.0 if HUNG in states.values() else _GRACE_SECONDS)
        elif now > self._compare_at + ROUND_SECONDS or all(heard_at[rank] > self._compare_at for rank in states):
            self._diagnose(active, is_error=FAILING in states.values())

    def _end_silent(self, silent: Sequence[RankProcess]) -> None:
        others = {each.machine for each in self._processes} - {self._own.machine}
        who, here = hosts_text(silent), f"rank 0 (host {self._own.host})"
        if len(others) > 1 and others == {each.machine for each in silent}:
            line = f"{here} hears none of the other {len(others)} hosts; its own connection is the likely cause"
            self._propose(RunEnding((0,), line, f"  not heard: {who}"))
        else:
            ranks = tuple(each.rank for each in silent)
            self._propose(RunEnding(ranks, f"{who} {UNREACHABLE}, as seen from {here}"))

    def _diagnose(self, active: Sequence[RankProcess], *, is_error: bool) -> None:
        beats, statuses = self._beats, {each.rank: self._beats.status_of(each.rank) for each in active}
        trouble = next(status.trouble for status in statuses.values() if status and status.trouble)
        # Lost packets delay heartbeats; only a rank that is stopped or dead sends none for so long.
        is_stopped = any(beats.heard_at[rank] < self._compare_at - _STOPPED_SECONDS for rank in statuses)
        network = "" if is_stopped else self._late_heartbeats(statuses)
        for rank, status in statuses.items():
            if beats.heard_at[rank] < self._compare_at:
                statuses[rank] = None
            elif status is not None and beats.state_of(rank) == FAILING:
                # The rank was in its last collective when that failed.
                statuses[rank] = replace(status, inside=status.last)
        silent = [each for each in active if statuses[each.rank] is None]
        is_far = all(each.machine != self._own.machine for each in silent)
        diagnosis = diagnose(statuses, network=network, why_silent=UNREACHABLE if is_far else SILENT)
        who = ", ".join(str(self._processes[rank]) for rank in diagnosis.at_fault) or "no single rank"
        first, _, text = trouble.partition("\n")
        why = diagnosis.why
        if is_error and not diagnosis.at_fault and not network:
            why += f"; the connection between ranks broke, so the network is at fault: {first.strip()}"
        lines = [first, *status_lines(self._processes, statuses, diagnosis), text]
        report = "\n".join(filter(None, [*lines, f"  stacks: {self._report.parent}/rank-*.txt"]))
        ending = RunEnding(diagnosis.at_fault, f"{who}: {why}", report, is_hang=not is_error)
        self._propose(replace(ending, silent=diagnosis.at_fault if silent else ()))

    def _late_heartbeats(self, statuses: Mapping[int, RankStatus | None]) -> str:
        """A text with the hosts whose heartbeats came late; empty if none did, or if rank zero's own came late too."""
        late = {
            self._processes[rank].host: max(status.late)
            for rank, status in statuses.items()
            if status and status.late and self._processes[rank].machine != self._own.machine
        }
        own = self._beats.status_of(self._own.rank)
        if not late or (own and own.late):
            return ""
        texts = ", ".join(f"host {host} (up to {seconds:.1f} s)" for host, seconds in late.items())
        return f"heartbeats came late from {texts}: the network loses packets"

    def _report_trouble(self, state: str, trouble: str) -> None:
        """Make rank zero compare the ranks, because this rank has hung or failed."""
        self._trouble_at = time.monotonic()
        self._beats.trouble, self._beats.state = trouble, state
        self._beats.flush()

    def _propose(self, ending: RunEnding) -> None:
        """Propose how the run ends; the first proposal of all ranks counts."""
        self._beats.proposal = ending
        self._beats.flush()

    def _report_failure(self, failure: RunEnding, *, is_secondary: bool) -> RunEnding | None:
        """Report a failure; returns the run's ending if another rank's failure caused this one."""
        self._is_failing = True
        wait = SILENT_SECONDS + ROUND_SECONDS if is_secondary else _FLUSH_SECONDS
        self._ends_at = time.monotonic() + wait + _LEAVING_SECONDS
        if self._ending is None and is_secondary:
            self._write_stacks()
            self._report_trouble(FAILING, f"  {self._own} met {failure.line}\n{failure.text}")
        elif self._ending is None:
            line = f"{self._own} was the first to fail: {failure.line}"
            self._propose(replace(failure, at_fault=(self._own.rank,), line=line))
        self._ending_known.wait(wait)
        ending = self._ending
        return ending if ending is not None and is_secondary and self._own.rank not in ending.at_fault else None

    def _accept(self, ending: RunEnding) -> None:
        if not self._is_failing:
            self._ends_at = time.monotonic() + (0.0 if ending.is_hang else _GRACE_SECONDS)
        if ending.is_hang:
            # At once: when another rank leaves, a collective of this one may raise, and its stacks would be those.
            self._write_stacks()
        self._ending, self._beats.state = ending, ENDED
        self._beats.flush()
        has_no_store = ending is not self._beats.ending
        is_user_error = ending.code == USER_ERROR_EXIT_CODE
        if self._own.rank == 0 or self._is_reporter(ending) or has_no_store:
            mark_ended(self._report.parents[1], "hung" if ending.is_hang else "failed", ending.line)
            if not is_user_error:
                try_to_finish(lambda: self._write_report(ending, keeps_other=has_no_store))
        # Usually every rank has the same error of the user: the reporter prints its own, or this report when it leaves.
        if self._is_reporter(ending) and not has_no_store and not is_user_error:
            _print(f"watchdog: {ending.report}\n")
        self._ending_known.set()

    def _is_reporter(self, ending: RunEnding) -> bool:
        return self._own.rank == min({each.rank for each in self._processes}.difference(ending.at_fault), default=-1)

    def _write_report(self, ending: RunEnding, *, keeps_other: bool) -> None:
        path = self._report
        with suppress(OSError):
            # A rank that cannot reach the store does not replace a report that another rank has written of this run.
            if not (keeps_other and path.exists() and path.stat().st_mtime > self._began):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, ending.report + "\n")

    def _leave(self, ending: RunEnding) -> NoReturn:
        """End the process from this thread: the other threads may wait in a collective forever."""
        is_first = not any(each.rank < self._own.rank and each.rank not in ending.silent for each in self._neighbours)
        if self._is_reporter(ending) and ending.code == USER_ERROR_EXIT_CODE:
            _print(f"watchdog: {ending.report}\n")
        elif is_first:
            _print(f"watchdog: rank {self._own.rank} ends: {ending.line}\n")
        if ending.code == USER_ERROR_EXIT_CODE and self._stacks is not None:
            self._stacks.close()
        elif not ending.is_hang:
            self._write_stacks()
        for each in self._neighbours if is_first else ():
            if each.rank in ending.silent:
                kill_process(each, ending.line)
        if ending.silent:
            # Do not exit at once: a launcher that sees this rank exit may signal other ranks, which are still killing.
            time.sleep(1.5)
        self._wait_for_others(ROUND_SECONDS)
        try_to_finish(lambda: record_error(ending.line, cause=ending.line))
        os._exit(ending.code or RUN_ERROR_EXIT_CODE)

    def _write_stacks(self) -> None:
        if (stacks := self._stacks) is not None:
            try_to_finish(lambda: stacks.write(self.progress.status()))


def _silent_limit(state: str) -> float:
    return SILENT_SECONDS if state in (RUNNING, HUNG, FAILING) else PREPARING_SECONDS


@contextmanager
def start_monitor(progress: RankProgress, world: World, store: dist.Store, output_dir: Path) -> Iterator[Monitor]:
    """While open, watch this rank and compare it with the others. Every rank opens it, with the run's store."""
    processes = join(store, RankProcess.here(world.rank), world.world_size)
    monitor = Monitor(progress, processes, store, output_dir)
    monitor.start()
    try:
        with monitor.report_errors():
            yield monitor
    finally:
        monitor.close()


def _print(text: str) -> None:
    """Write to the file descriptor of standard error: the training thread may hold the lock of `sys.stderr`."""
    # A full disk or a closed pipe must not stop this thread, because it has to end the run.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
