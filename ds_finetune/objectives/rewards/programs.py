"""Runs the program in a sampled answer against the tests of its data row, in processes with resource limits (judge.py).

The limits protect a run from faulty programs: endless loops, much memory or output, writes into the current folder, use
of the network. They are no security boundary, because a program runs as the user of the run and can read the user's
files. If answers may be hostile, run the whole training in a container without secrets.
"""

import ast
import ctypes
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.objectives.rewards.answers import RewardFaultError

_BLOCK = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_OUTPUT_BYTES = 2**24
_JUDGE = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import judge; judge.main(sys.argv[1])"


@dataclass(frozen=True)
class Tests:
    """Tests of a generated program: Python code, or pairs of standard input and expected output."""

    code: tuple[str, ...] = ()
    dialogues: tuple[tuple[str, str], ...] = ()


def read_tests(value: Any) -> Tests:  # noqa: ANN401 - any JSON value
    """Read the tests of a data row: Python code as a text or a list of texts, `{inputs: [...], outputs: [...]}`, or a
    list of `{input, output}`. The latter two may also be JSON texts.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            parsed = json.loads(value)
            value = parsed if isinstance(parsed, dict | list) else value
    if isinstance(value, str) and value.strip():
        return _code_of(value)
    if isinstance(value, Mapping) and not value.get("fn_name"):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            value = [{"input": each, "output": output} for each, output in zip(inputs, outputs, strict=True)]
    if isinstance(value, list) and value and all(isinstance(test, str) for test in value):
        return _code_of(*value)
    if isinstance(value, list) and value and all(_is_dialogue(test) for test in value):
        return Tests(dialogues=tuple((test["input"], test["output"]) for test in value))
    raise RewardFaultError(
        f"is {type(value).__name__} {value!r:.60}, and should be Python code, a list of it, a list of "
        "{input, output}, or {inputs: [...], outputs: [...]} of texts"
    )


def _code_of(*tests: str) -> Tests:
    """Tests from Python code. RewardFaultError for code that every program would pass, or that none could."""
    try:
        with warnings.catch_warnings(action="ignore"):
            modules = [ast.parse(test, "test.py") for test in tests]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise RewardFaultError(f"is no Python code: {fault}") from None
    if not any(map(_is_checking, modules)):
        raise RewardFaultError(
            "asserts nothing and calls no function, so every program would pass; a function of tests must also be "
            "called, as in `check(NAME)`"
        )
    return Tests(code=tests)


def _is_checking(node: ast.AST) -> bool:
    """Whether the code has a call, an `assert` or a `raise` outside of definitions of functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    return isinstance(node, ast.Call | ast.Assert | ast.Raise) or any(map(_is_checking, ast.iter_child_nodes(node)))


def _is_dialogue(test: object) -> bool:
    return isinstance(test, Mapping) and all(isinstance(test.get(key), str) for key in ("input", "output"))


def score_program(text: str, tests: Tests, *, timeout: float, memory: int) -> float | None:
    """Fraction of the tests that an answer's program passes within `timeout` seconds in all; None without a program.

    The program is the last code block marked as Python, or else the last code block.
    """
    blocks = _BLOCK.findall(text)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    program = next(iter([*python[-1:], *(code for _, code in blocks[-1:])]), "")
    if not program.strip():
        return None
    deadline = time.monotonic() + timeout
    if tests.code:
        passed, _ = _run(program, tests.code, "", deadline=deadline, memory=memory)
        return passed / len(tests.code)
    right = 0
    for given, expected in tests.dialogues:
        ended, output = _run(program, (), given, deadline=deadline, memory=memory)
        right += bool(ended) and _lines(output) == _lines(expected)
    return right / len(tests.dialogues)


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _run(program: str, tests: Sequence[str], given: str, *, deadline: float, memory: int) -> tuple[int, str]:
    """Run a program with its tests. Returns the number of passed tests (without tests: 1 if the program ran to its
    end), and the program's output.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return 0, ""
    limits = {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_DATA": memory,
        "RLIMIT_FSIZE": _OUTPUT_BYTES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        # The program may start no processes or threads; this limit does not bind root.
        "RLIMIT_NPROC": 0,
    }
    # Cleaning up may fail, because the program may have created folders that cannot be removed.
    with tempfile.TemporaryDirectory(prefix="reward-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "in").write_text(given, encoding="utf-8")
        (folder / "out").touch()
        (folder / "work").mkdir()
        report, error, is_late = _drive(folder, pickle.dumps((program, tuple(tests), limits)), seconds)
        printed = (folder / "out").read_text(encoding="utf-8", errors="replace")
    begun, *lines = report.splitlines() or [""]
    if not begun and not is_late:
        raise RewardFaultError(f"could not start Python for a program: {error[-300:]!r}")
    if refused := [line.removeprefix("refused ") for line in lines if line.startswith("refused ")]:
        raise RewardFaultError(f"has tests that give a program what is no data: {refused[0]:.300}")
    return len(set(lines) & {str(number) for number in range(max(len(tests), 1))}), printed


def _drive(folder: Path, task: bytes, seconds: float) -> tuple[str, str, bool]:
    """Run judge.py, then kill all processes that it left. Returns report, standard error and whether it timed out."""
    libc, others = ctypes.CDLL(None), _children()
    # With PR_SET_CHILD_SUBREAPER of prctl(2), this process becomes the parent of descendants whose parent has ended.
    libc.prctl(36, 1, 0, 0, 0)
    process = subprocess.Popen(
        [sys.executable, "-I", "-X", "utf8", "-c", _JUDGE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder / "work",
        env={"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    is_late = False
    try:
        report, error = process.communicate(task, seconds)
    except subprocess.TimeoutExpired:
        is_late = True
        process.kill()
        report, error = process.communicate()
    finally:
        process.kill()
        process.wait()
        while remaining := _children() - others:
            _kill(remaining)
        libc.prctl(36, 0, 0, 0, 0)
    return report.decode(), error.decode(errors="replace"), is_late


def _kill(children: set[int]) -> None:
    for pid in children:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _children() -> set[int]:
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        # The file of a thread in /proc vanishes if the thread ends while it is read.
        with suppress(OSError):
            pids |= set(map(int, file.read_text().split()))
    return pids
