"""Runs the program of an answer with the tests of its record, in a child process with limits.

The limits protect a run from programs that are wrong: endless loops, much memory or output, writing into the current
folder, use of the network. They are no security boundary: a program runs as the user of the run and can read the user's
files. Where answers may be hostile, run the whole training in a container without secrets.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.objectives.rewards.answers import RewardFaultError

_BLOCK = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_OUTPUT_BYTES = 2**24
_DRIVER = r"""
import ctypes, json, os, resource, sys
report = int(sys.argv[1])
with open(sys.argv[2]) as file:
    task = json.load(file)
os.unlink(sys.argv[2])
# A network of its own, as `unshare --net`; as another user than root it needs a user namespace first. Where neither
# is allowed, the program has the network of this machine.
ctypes.CDLL(None).unshare(0x40000000 | (0x10000000 if os.geteuid() else 0))
for name, most in task["limits"].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    most = most if hard < 0 else min(most, hard)
    resource.setrlimit(getattr(resource, name), (most, most))
def say(number, key=task["key"]):
    os.write(report, f"{key} {number}\n".encode())
say("begins")
scope = {"__name__": "__main__"}
tests = task["tests"]
try:
    exec(compile(task["program"], "answer.py", "exec"), scope)
except SystemExit as end:
    if tests or end.code:
        raise
if not tests:
    sys.stdout.flush()
    say(0)
for number, test in enumerate(tests):
    try:
        exec(compile(test, "test.py", "exec"), scope)
    except Exception:
        continue
    say(number)
"""
"""Writes into a file, with a key that only it knows, which tests have run to their end: the exit code of a program says
nothing of that.
"""


@dataclass(frozen=True)
class Tests:
    """Tests of a program: Python code, or inputs with the outputs that are expected."""

    code: tuple[str, ...] = ()
    dialogues: tuple[tuple[str, str], ...] = ()


def read_tests(value: Any) -> Tests:  # noqa: ANN401 - any JSON value
    """The tests of a record: Python code as a text or a list of texts, `{inputs: [...], outputs: [...]}`, or a list of
    `{input, output}`; the latter two may be JSON texts.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            parsed = json.loads(value)
            value = parsed if isinstance(parsed, dict | list) else value
    if isinstance(value, str) and value.strip():
        return Tests(code=(value,))
    if isinstance(value, Mapping) and not value.get("fn_name"):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            value = [{"input": each, "output": output} for each, output in zip(inputs, outputs, strict=True)]
    if isinstance(value, list) and value and all(isinstance(test, str) for test in value):
        return Tests(code=tuple(value))
    if isinstance(value, list) and value and all(_is_dialogue(test) for test in value):
        return Tests(dialogues=tuple((test["input"], test["output"]) for test in value))
    raise RewardFaultError(
        f"is {type(value).__name__} {value!r:.60}, and should be Python code, a list of it, a list of "
        "{input, output}, or {inputs: [...], outputs: [...]} of texts"
    )


def _is_dialogue(test: object) -> bool:
    return isinstance(test, Mapping) and all(isinstance(test.get(key), str) for key in ("input", "output"))


def score_program(text: str, tests: Tests, *, timeout: float, memory: int) -> float | None:
    """The share of the tests that the program in a text passes within `timeout` seconds for all of them; None where the
    text has no program. The program is the last fenced block of Python, or else the last block.
    """
    blocks = _BLOCK.findall(text)
    ours = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    program = next(iter([*ours[-1:], *(code for _, code in blocks[-1:])]), "")
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
    """The number of tests that passed, or without tests 1 if the program ran to its end, and what it printed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return 0, ""
    limits = {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_DATA": memory,
        "RLIMIT_FSIZE": _OUTPUT_BYTES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        # No further processes and threads; root is not bound by it.
        "RLIMIT_NPROC": 0,
    }
    key = secrets.token_hex(16)
    task = {"program": program, "tests": list(tests), "limits": limits, "key": key}
    # The program may have made folders that cannot be removed.
    with tempfile.TemporaryDirectory(prefix="reward-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task))
        (folder / "in").write_text(given)
        (folder / "work").mkdir()
        is_late = _drive(folder, seconds)
        printed = (folder / "out").read_text(errors="replace")
        report = (folder / "report").read_text(errors="replace").splitlines()
        if f"{key} begins" not in report and not is_late:
            error = (folder / "error").read_text(errors="replace").strip()
            raise RewardFaultError(f"could not start Python for a program: {error[-300:]!r}")
    return len(set(report) & {f"{key} {number}" for number in range(max(len(tests), 1))}), printed


def _drive(folder: Path, seconds: float) -> bool:
    """Run the driver until it ends or its time is up, and return whether it is; then nothing of its session is left."""
    with (
        (folder / "in").open("rb") as stdin,
        (folder / "out").open("wb") as stdout,
        (folder / "error").open("wb") as stderr,
        (folder / "report").open("wb") as report,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _DRIVER, str(report.fileno()), str(folder / "task.json")],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder / "work",
            env={"OMP_NUM_THREADS": "1"},
            pass_fds=(report.fileno(),),
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        else:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
