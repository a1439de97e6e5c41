"""The worker process that computes rewards, started by pool.py.

It reads requests as lines of JSON with a reward's number and an answer, and replies to each with one line. An alarm
raises an exception in a reward that takes too long. If the exception is not raised, as in C code, pool.py kills the
worker. When pool.py's process dies, the kernel kills the worker. Output of reward functions goes to the pool's log.
"""

import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ds_finetune.objectives.rewards.answers import AnswerToScore, Outcome, RewardFaultError, column_of
from ds_finetune.objectives.rewards.builtin import BUILTIN, Settings
from ds_finetune.system.processes import die_with_parent

GRACE_SECONDS = 10.0
"""Seconds after the alarm of a reward until pool.py kills the worker process."""
ARGUMENTS = ("record", "prompt", "text", "token_ids", "finish_reason")
"""Names of the arguments with which a user's reward function may be called."""
_READ = 100
"""Number of characters of the result parsed from an answer that pool.py gets."""
Scorer = Callable[[AnswerToScore], Outcome]


class RewardAlarmError(BaseException):
    """A reward took too long. This is not an Exception, so that `except Exception` in a reward does not catch it."""


def seconds_of(settings: Settings) -> float:
    """Seconds until a reward's alarm. The reward `code` gets more time, because it enforces its own `timeout`."""
    return float(settings["timeout"]) + GRACE_SECONDS * (settings["reward"] == "code")


def load_scorer(settings: Settings) -> Scorer:
    """Function that computes a reward. RewardFaultError if it cannot be loaded from a package or the user's file."""
    builtin = BUILTIN.get(settings["reward"])
    if builtin is None:
        return _FileReward(settings["reward"])
    if builtin.package and importlib.util.find_spec(builtin.package) is None:
        package = builtin.package.replace("_", "-")
        raise RewardFaultError(f"needs the package {package}, which `pip install ds_finetune[math]` installs")
    if builtin.package:
        from ds_finetune.errors import DependencyError
        from ds_finetune.system.versions import check_versions

        try:
            check_versions("math")
        except DependencyError as outside:
            raise RewardFaultError(f"needs another version of a package: {outside.message}") from None

    def score(answer: AnswerToScore) -> Outcome:
        return builtin.score(answer, read_reference(settings, answer.record), settings)

    return score


def read_reference(settings: Settings, record: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    """The reference answer of a data row as the built-in reward parses it. RewardFaultError if the row has none."""
    builtin, column = BUILTIN[settings["reward"]], settings["column"]
    if builtin.read is None or not column:
        return None
    value = column_of(record, column)
    if value is None:
        raise RewardFaultError(f"needs column `{column}`, and the record has {', '.join(sorted(record))}")
    try:
        return builtin.read(value)
    except RewardFaultError as unread:
        raise RewardFaultError(f"cannot use column `{column}`: it {unread}") from None


def needs_of(rewards: Sequence[Settings], record: Mapping[str, Any]) -> str:
    """The error message of the first reward that cannot use a data row; empty if all can."""
    for settings in rewards:
        try:
            _ = settings["reward"] in BUILTIN and read_reference(settings, record)
        except RewardFaultError as fault:
            return f"reward `{settings['name']}` {fault}"
    return ""


def late_part(settings: Settings, end: str = "") -> dict[str, Any]:
    """Result of a reward that took too long: the score `unparsed` if that is the answer's fault, else an error."""
    builtin = BUILTIN.get(settings["reward"])
    if builtin is not None and builtin.is_long_answers_fault:
        return {"score": settings["unparsed"], "has_result": False}
    return {"error": f"took more than {settings['timeout']:g} seconds (`timeout`) {end}".rstrip(), "is_stuck": True}


class _FileReward:
    """A reward function of a user's file. Coroutines run in one event loop, so that connections can stay open."""

    def __init__(self, reward: str) -> None:
        file, _, name = reward.rpartition(":")
        self._loop: Any = None
        sys.path.insert(0, str(Path(file).resolve().parent))
        function = getattr(_module_of(file), name, None)
        if not callable(function):
            raise RewardFaultError(f"needs a function `{name}`, and {file} has none")
        self._call: Callable[..., Any] = function
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        by_name = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        unknown = [each.name for each in by_name if each.name not in ARGUMENTS and each.default is each.empty]
        if unknown or any(each.kind is each.POSITIONAL_ONLY for each in parameters):
            raise RewardFaultError(
                f"has the arguments {', '.join(each.name for each in parameters)}; it is called for one answer with "
                f"those it names of {', '.join(ARGUMENTS)}, by keyword"
            )
        self._names = [name for name in ARGUMENTS if takes_all or name in {each.name for each in by_name}]

    def __call__(self, answer: AnswerToScore) -> Outcome:
        # The data row is copied, because a reward may change it, and other rewards get it too.
        values = (deepcopy(answer.record), answer.prompt, answer.text, list(answer.ids), answer.finish)
        given = dict(zip(ARGUMENTS, values, strict=True))
        score = self._call(**{name: given[name] for name in self._names})
        if inspect.isawaitable(score):
            # asyncio is imported only if needed, because the import takes half of the start-up time.
            import asyncio

            async def awaited() -> Any:  # noqa: ANN401 - what a reward returns
                return await score

            self._loop = self._loop or asyncio.Runner()
            return Outcome(self._loop.run(awaited()))
        return Outcome(score)


def _module_of(file: str) -> ModuleType:
    name = f"reward file {Path(file).resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def check_score(score: Any) -> float | None:  # noqa: ANN401 - what a reward returns
    """The score (of Python, numpy or torch) as a float, or None; RewardFaultError if it is not a finite number."""
    score = score.item() if getattr(score, "shape", None) == () else score
    if score is None:
        return None
    if isinstance(score, list | tuple | dict):
        raise RewardFaultError(f"returned {len(score)} scores ({score!r:.60}), and should return one for one answer")
    if not isinstance(score, Real):
        raise RewardFaultError(f"returned {type(score).__name__} {score!r:.60}, and should return a number or None")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFaultError(f"returned {number}, and should return a finite number or None")
    return number


def run_reward(scorer: Scorer, settings: Settings, answer: AnswerToScore) -> dict[str, Any]:
    """Result of one reward on one answer: `score`, `has_result`, `read` and `seconds`, or an `error`."""
    began = time.monotonic()
    part: dict[str, Any] = {}
    try:
        _set_limits(seconds_of(settings), settings["memory"])
        try:
            outcome = scorer(answer)
            part = {"score": check_score(outcome.score), "has_result": outcome.has_result, "read": outcome.read[:_READ]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RewardFaultError as fault:
        part = {"error": str(fault)}
    except RewardAlarmError:
        part = late_part(settings)
    except BaseException as raised:  # noqa: BLE001 - whatever the code of a user raises, also by sys.exit
        traceback.print_exc()
        part = {"error": f"raised {_shown(raised)}"}
    return {**part, "seconds": time.monotonic() - began}


def _shown(raised: BaseException) -> str:
    frames = traceback.extract_tb(raised.__traceback__)
    location = f" at {frames[-1].filename} line {frames[-1].lineno}" if frames else ""
    return f"{type(raised).__name__}: {raised!s:.300}{location}"


def _set_limits(seconds: float, memory: int) -> None:
    """Set the alarm and the memory limit of one call of a reward, because the previous reward may have changed them."""
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory if hard < 0 else min(memory, hard), hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _raise_time_is_up(_: int, __: FrameType | None) -> None:
    raise RewardAlarmError


def _load(rewards: list[Settings]) -> tuple[list[Scorer], str, int]:
    scorers: list[Scorer] = []
    for number, settings in enumerate(rewards):
        try:
            _set_limits(seconds_of(settings) + 60, settings["memory"])
            scorers.append(load_scorer(settings))
        except RewardFaultError as fault:
            return [], str(fault), number
        except BaseException as raised:  # noqa: BLE001 - whatever the file of a user raises when it is imported
            traceback.print_exc()
            return [], f"cannot be imported: {_shown(raised)}", number
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return scorers, "", 0


def main(descriptor: int) -> None:
    """Answer requests from the socket until it is closed, or until the thread that started this process ends."""
    owner = os.getpid()
    die_with_parent()
    # A scheduler sends SIGTERM and SIGUSR1 to all processes, but rewards are needed until the run has saved.
    for ignored in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ignored, lambda *_: None)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw", encoding="utf-8") as lines:
        # Otherwise programs that a reward starts would inherit the connection and keep it open, as would forks.
        connection.set_inheritable(False)
        os.register_at_fork(after_in_child=lambda: os.close(descriptor))
        rewards = json.loads(lines.readline())
        scorers, error, number = _load(rewards)
        print(json.dumps({"error": error, "at": number, "request": 1}), file=lines, flush=True)
        for request, line in enumerate(lines, 2):
            at, answer = json.loads(line)
            part = run_reward(scorers[at], rewards[at], AnswerToScore(**answer))
            if os.getpid() != owner:
                # This is the child process of a reward that forked. It must not write a second reply.
                os._exit(0)
            print(json.dumps({**part, "request": request}), file=lines, flush=True)
