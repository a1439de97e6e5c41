"""Scores answers with reward functions in worker processes, in the background.

A reward function may loop for ever, end its process or use up the memory. If a worker process ended, it is restarted
once for the same reward. If a reward exceeds the time limit, its process and all child processes are killed. In both
cases the other rewards of the answer still count.
"""

import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.rewards import RewardConfig
from ds_finetune.errors import ConfigError, RewardError
from ds_finetune.objectives.rewards.answers import AnswerToScore, RewardFaultError
from ds_finetune.objectives.rewards.worker import GRACE_SECONDS, late_part, seconds_of

Part = Mapping[str, Any]
"""Result of one reward on one answer: `score`, `has_result`, `read` and `seconds`, or an `error`."""
_PACKAGES = str(Path(__file__).resolve().parents[3])
_PROGRAM = (
    f"import sys; sys.path.append({_PACKAGES!r}); from ds_finetune.objectives.rewards import worker; "
    "worker.main(int(sys.argv[1]))"
)
_START_SECONDS, _END_SECONDS = 120.0, 1.0
_LOG_BYTES = 2**24
"""Size in bytes at which the workers' log is emptied. A line in the log then says that it was emptied."""


class _EndedError(Exception):
    """The worker process ended without a reply; the exception's argument says how."""


class _Worker:
    """A worker process that computes rewards. It starts when it is first needed, and again if it has ended."""

    def __init__(self, settings: Sequence[Mapping[str, Any]], log: IO[bytes]) -> None:
        self._settings, self._log = settings, log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.at = 0
        """Index of the reward that is being computed, or that could not be loaded."""
        self._requests = 0

    def start(self) -> None:
        if self._process is not None:
            return
        if self._is_closed:
            raise _EndedError("is not needed any more")
        # In a session of its own the worker gets no Ctrl-C, and can be killed together with a reward's child processes.
        self._socket, other = socket.socketpair()
        self._requests = 0
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        if self._is_closed:
            # `close` was called while the process started and may have missed it, so the process is ended here.
            self._signal()
        limit = _START_SECONDS + max(map(seconds_of, self._settings))
        try:
            reply = self._reply(json.dumps(self._settings), limit)
        except TimeoutError:
            raise RewardFaultError(f"takes more than {limit:g} seconds to load") from None
        if reply["error"]:
            self.at = reply["at"]
            self.kill()
            raise RewardFaultError(reply["error"])

    def score(self, at: int, answer: str) -> Part:
        """Result of reward number `at` on an answer in JSON; TimeoutError if the process was killed for being late."""
        self.at = at
        self.start()
        reply = self._reply(f"[{at}, {answer}]", seconds_of(self._settings[at]) + GRACE_SECONDS)
        if "is_stuck" in reply:
            self.kill()
        return reply

    def close(self) -> None:
        """End the worker process for good. A thread that waits for its reply gets an error."""
        self._is_closed = True
        self._signal()

    def kill(self) -> None:
        if self._process is None:
            return
        assert self._socket is not None
        self._signal()
        self._process.wait()
        self._socket.close()
        self._process = None

    def _signal(self) -> None:
        with suppress(ProcessLookupError):
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reply(self, message: str, seconds: float) -> dict[str, Any]:
        assert self._socket is not None
        self._requests += 1
        self._socket.settimeout(seconds)
        line = b""
        try:
            self._socket.sendall(message.encode() + b"\n")
            while not line.endswith(b"\n"):
                received = self._socket.recv(2**16)
                if not received:
                    self._raise_ended()
                line += received
        except TimeoutError:
            self.kill()
            raise
        except ConnectionError:
            self._raise_ended()
        with suppress(ValueError):
            reply = json.loads(line)
            if isinstance(reply, dict) and reply.get("request") == self._requests:
                return reply
        self.kill()
        raise _EndedError(f"wrote {line!r:.60} into the connection of its process, which ended")

    def _raise_ended(self) -> NoReturn:
        assert self._process is not None
        # The worker may have closed only its socket, so its exit code is awaited first.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._signal()
        code = self._process.wait()
        self.kill()
        raise _EndedError(
            "ended its process with " + (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        )


class PendingScores:
    """Answers whose rewards are being computed in the background."""

    def __init__(self, rewards: "Rewards") -> None:
        self._rewards = rewards
        self._answers: list[AnswerToScore] = []
        self._futures: list[Future[list[Part]]] = []

    def add(self, answer: AnswerToScore) -> None:
        """Add an answer. Its scoring begins in the background."""
        self._answers.append(answer)
        self._futures.append(self._rewards.submit(answer))

    def cancel(self) -> None:
        """Cancel the answers that no worker has started to score."""
        for future in self._futures:
            future.cancel()

    def is_scored(self, *, within: float) -> bool:
        """Wait at most `within` seconds. True if all answers are scored, or if a reward has failed on one."""
        done, pending = wait(self._futures, within)
        parts = (part for future in done if not future.cancelled() for part in future.result())
        return not pending or any("error" in part for part in parts)

    def parts(self) -> list[list[Part]]:
        """Results of all rewards on all answers, including errors. Waits for all answers."""
        return [future.result() for future in self._futures]

    def result(self) -> NDArray[np.float64]:
        """Scores, fp64 [answers, rewards], with NaN if a reward is not applicable. Waits for all answers.

        RewardError for the first answer on which a reward failed, without waiting for later answers.
        """
        for answer, future in zip(self._answers, self._futures, strict=True):
            parts = zip(self._rewards.names, future.result(), strict=True)
            for name, error in ((name, part["error"]) for name, part in parts if "error" in part):
                self.cancel()
                raise self._rewards.error(name, error, answer)
        return self._array("score")

    def has_result(self) -> NDArray[np.float64]:
        """Whether a reward parsed a result, 1 or 0; NaN for rewards that parse nothing; fp64 [answers, rewards]."""
        return self._array("has_result")

    def _array(self, key: str) -> NDArray[np.float64]:
        rows = [[np.nan if part.get(key) is None else part[key] for part in parts] for parts in self.parts()]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self._rewards.names))


class Rewards:
    """The reward functions of a run, with their worker processes; see `open_rewards`."""

    def __init__(self, sections: Sequence[RewardConfig], workers: int, log: IO[bytes]) -> None:
        self.names = tuple(section.shown_name for section in sections)
        self.weights = np.array([section.weight for section in sections], dtype=np.float64)
        self._settings = [section.settings for section in sections]
        self._log = log
        self._workers = [_Worker(self._settings, log) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")

    def check(self) -> None:
        """Start one worker process. ConfigError if a reward cannot be loaded."""
        worker = self._workers[0]
        try:
            worker.start()
        except (RewardFaultError, _EndedError) as fault:
            name = self._settings[worker.at]["reward"]
            raise ConfigError(
                f"reward `{name}` does not work: it {fault}",
                hint=f"{self._log_line()}write e.g. `def reward(record, text)`, which returns a number",
            ) from None

    def start(self, answers: Iterable[AnswerToScore] = ()) -> PendingScores:
        """Score answers in the background. More answers may be added to the returned object."""
        pending = PendingScores(self)
        for answer in answers:
            pending.add(answer)
        return pending

    def submit(self, answer: AnswerToScore) -> Future[list[Part]]:
        """Score one answer in the background. The result has a `Part` for each reward."""
        return self._threads.submit(self._score, answer)

    def error(self, name: str, reason: str, answer: AnswerToScore) -> RewardError:
        """Error for a reward that failed on an answer. `reason` says how, such as `raised ValueError: ...`."""
        record = json.dumps(answer.record, ensure_ascii=False)
        return RewardError(
            f"reward `{name}` failed on {answer.where}: it {reason}\n  answer: {answer.text!r:.300}\n"
            f"  record: {record:.300}",
            hint=f"{self._log_line()}within `timeout` seconds a reward returns a number, or None for not applicable",
        )

    def close(self) -> None:
        """End all worker processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()
        for worker in self._workers:
            worker.kill()

    def _log_line(self) -> str:
        return f"what it printed is in {self._log.name}; " if isinstance(self._log.name, str) else ""

    def _score(self, answer: AnswerToScore) -> list[Part]:
        worker = self._idle.get()
        try:
            text = json.dumps(asdict(answer))
            return [self._part(worker, at, text) for at in range(len(self.names))]
        finally:
            log = self._log.fileno()
            if os.fstat(log).st_size > _LOG_BYTES:
                os.ftruncate(log, 0)
                os.write(log, f"This log had more than {_LOG_BYTES:,} bytes and was emptied here.\n".encode())
            self._idle.put(worker)

    def _part(self, worker: _Worker, at: int, answer: str) -> Part:
        """Result of one reward on one answer. If the worker process ends, the request is repeated once."""
        reason, settings = "", self._settings[at]
        for _ in range(2):
            try:
                return worker.score(at, answer)
            except TimeoutError:
                return {**late_part(settings, "and its process was killed"), "seconds": settings["timeout"]}
            except RewardFaultError as fault:
                return {"error": str(fault), "seconds": 0.0}
            except _EndedError as ended:
                reason = str(ended)
        return {"error": f"{reason}, twice", "seconds": 0.0}


def check_files(sections: Sequence[RewardConfig]) -> None:
    """ConfigError if the file of a reward cannot be read or lacks the named function. The file is not imported."""
    for section in sections:
        try:
            text = Path(section.file).read_text(encoding="utf-8") if section.file else section.reward
            compile(text if section.file else "", str(section.file), "exec")
        except (OSError, SyntaxError, ValueError) as broken:
            raise ConfigError(f"reward `{section.reward}` cannot be read: {broken}", hint="correct the file") from None
        if (name := section.reward.rpartition(":")[2]) not in text:
            raise ConfigError(f"reward `{section.reward}`: the file has no `{name}`", hint="name one of its functions")


@contextmanager
def open_rewards(
    sections: Sequence[RewardConfig], *, workers: int = 0, ranks_here: int = 1, log: Path | None = None
) -> Iterator[Rewards]:
    """Context manager with the rewards of a run. Their worker processes end with it.

    `workers` is the number of processes. 0 means the largest `workers` of `sections` or, if that is 0 too, this rank's
    part of the cores of a machine with `ranks_here` ranks. What reward functions print is appended to the file `log`,
    or to a temporary file. ConfigError if a reward cannot be loaded.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // ranks_here)
    number = workers or max(section.workers for section in sections) or cores
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("ab") if log is None else log.open("ab") as file:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        rewards = Rewards(sections, number, file)
        try:
            rewards.check()
            yield rewards
        finally:
            rewards.close()
