"""Supervisors on this machine: their messages, and how an attempt ends when one of them ends."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.cluster.host_checks import Check
from ds_finetune.cluster.launch.attempt import Attempt, AttemptOutcome, exit_code_of
from ds_finetune.cluster.launch.line_thread import LineThread
from ds_finetune.cluster.launch.messages import StartRanks
from ds_finetune.cluster.launch.process_tags import TAG_VARIABLE, kill_tagged, tagged_processes
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.cluster.launch.run import _failure_lines, show_if_open
from ds_finetune.config.hostfile import Host
from ds_finetune.config.sections import LaunchConfig
from tests.conftest import ROOT
from tests.running import tiny_task

HERE = Host("localhost", 1, 1)
TIMEOUTS = LaunchConfig(greeting_seconds=120, silent_seconds=60)


def _remote(folder: Path, script: str) -> Remote:
    """A Python that is started by `script`, in which "$@" are its arguments."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Remote(python=str(python), directory=str(ROOT))


def _run(
    remote: Remote, folder: Path, argv: list[str], *, silent_seconds: float = 60.0, **env: str
) -> tuple[Any, AttemptOutcome]:
    order = StartRanks(
        argv=argv,
        env={"PYTHONPATH": str(ROOT), **env},
        unset=[],
        tag=f"test.{os.getpid()}.{time.time_ns()}",
        earlier_tags=[],
        logs=str(folder / "logs"),
        watchdog=str(folder / "watchdog"),
        silent_seconds=silent_seconds,
        meeting_address="",
    )
    with Attempt([HERE], remote, TIMEOUTS.model_copy(update={"silent_seconds": silent_seconds})) as attempt:
        greeting = attempt.greetings()[HERE]
        outcome = attempt.run({HERE: order}, lambda _: None)
    assert not tagged_processes([order.tag])
    return greeting, outcome


LIKE_MESSAGES = [
    '{"kind": "ready"}',
    '{"kind": "rank-ended"}',
    'x {"kind": "rank-ended", "rank": 0, "pid": 1, "code": 7, "tail": [], "reason": ""}',
    "{}",
    "5",
    "null",
    '{"kind"',
]


def test_lines_of_a_shell_that_look_like_messages_are_none(tmp_path: Path) -> None:
    """Before the greeting, and while the supervisor runs."""
    printed = "; ".join(f"echo '{line}'" for line in LIKE_MESSAGES)
    remote = _remote(tmp_path, f'(for i in 1 2 3 4 5 6; do {printed}; sleep 0.3; done) & exec {sys.executable} "$@"')
    greeting, outcome = _run(remote, tmp_path, [sys.executable, "-c", "pass"])
    assert greeting.versions["torch"].startswith("2.")
    assert (outcome.code, outcome.first) == (0, None)


def _rank_that_is_killed(folder: Path, before: str) -> str:
    """The text about a rank whose process is killed after `before`."""
    code = f"""
import json, os, socket, signal
from pathlib import Path
from ds_finetune.cluster.launch.messages import RankConnected
from ds_finetune.system.process_messages import encode
from ds_finetune.system.processes import began_at
from ds_finetune.cluster.watchdog.kills import record_kill
control = socket.socket(socket.AF_UNIX)
control.connect("\\0" + os.environ["DS_FINETUNE_SUPERVISOR"])
control.sendall(encode(RankConnected(0, os.getpid())))
import time; time.sleep(0.5)
{before}
os.kill(os.getpid(), signal.SIGKILL)
"""
    _, outcome = _run(_remote(folder, f'exec {sys.executable} "$@"'), folder, [sys.executable, "-c", code])
    assert outcome.first is not None
    assert (outcome.first.rank, outcome.code) == (0, 137)
    return outcome.first.text


def test_memory_is_not_blamed_for_a_kill(tmp_path: Path) -> None:
    assert _rank_that_is_killed(tmp_path, "") == "ended with its node launcher, which was killed by SIGKILL"
    mark = f"record_kill(Path({str(tmp_path / 'watchdog')!r}), os.getpid(), began_at(os.getpid()), 'rank 0: does not answer')"
    told = "ended with its node launcher, which was killed by SIGKILL: by the watchdog, because rank 0: does not answer"
    assert _rank_that_is_killed(tmp_path, mark) == told


LEAVES = """
import json, os, socket, time
from pathlib import Path
from ds_finetune.cluster.launch.messages import RankConnected
from ds_finetune.system.process_messages import encode
from ds_finetune.cluster.watchdog.kills import record_cause
control = socket.socket(socket.AF_UNIX)
control.connect("\\0" + os.environ["DS_FINETUNE_SUPERVISOR"])
control.sendall(encode(RankConnected(0, os.getpid())))
time.sleep(0.5)
record_cause(Path(FOLDER), "rank 0 called os._exit(0) at x.py:7")
os._exit(0)
"""


def test_a_rank_that_leaves_without_an_error_is_no_kill(tmp_path: Path) -> None:
    code = LEAVES.replace("FOLDER", repr(str(tmp_path / "watchdog")))
    _, outcome = _run(_remote(tmp_path, f'exec {sys.executable} "$@"'), tmp_path, [sys.executable, "-c", code])
    assert outcome.code == 1
    line = next(iter(_failure_lines(outcome, 1, tmp_path)))
    assert line.endswith(" s: rank 0 called os._exit(0) at x.py:7")
    assert "SIGKILL" not in line


PAUSED_LAUNCH = """
import sys
from pathlib import Path
from tests.cluster.launch import test_attempt as module
folder = Path(sys.argv[1])
rank = "import sys, time; from pathlib import Path; folder = Path(sys.argv[1]); (folder / 'started').touch()"
rank += "\\nwhile not (folder / 'go').exists(): time.sleep(0.05)"
remote = module._remote(folder, f'exec {sys.executable} "$@"')
_, outcome = module._run(remote, folder, [sys.executable, "-c", rank, str(folder)], silent_seconds=3.0)
print(outcome)
sys.exit(outcome.code)
"""


def test_a_launch_that_was_paused_goes_on(tmp_path: Path) -> None:
    """Both ends are stopped for longer than a host may be silent, and the supervisor is the first to run again."""
    with subprocess.Popen(
        [sys.executable, "-c", PAUSED_LAUNCH, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + TIMEOUTS.greeting_seconds
        while not (tmp_path / "started").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        both = [*map(int, children), process.pid]
        for pid in reversed(both):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        (tmp_path / "go").touch()
        printed, _ = process.communicate(timeout=TIMEOUTS.greeting_seconds)
    assert process.returncode == 0, printed


def test_exit_codes_of_signals() -> None:
    assert (exit_code_of(-9), exit_code_of(5), exit_code_of(0)) == (137, 5, 1)


@pytest.mark.parametrize(("greeting", "wanted"), [(30, 28), (2.5, 1), (120, 118)])
def test_the_time_for_a_greeting_is_the_time_that_ssh_tries(greeting: float, wanted: int) -> None:
    command = Remote().with_greeting_limit(greeting).command(Host("elsewhere.invalid", 1, 1), ["true"])
    assert f"ConnectTimeout={wanted}" in command


@pytest.mark.parametrize(
    ("code", "wanted"), [("pass", 0), ("raise SystemExit(5)", 1), ("import os; os.kill(os.getpid(), 9)", 1)]
)
def test_a_node_launcher_that_ends(tmp_path: Path, code: str, wanted: int) -> None:
    # What a login shell prints before, without an end of its line, is no part of the supervisor's messages.
    remote = _remote(tmp_path, f"printf 'welcome'; exec {sys.executable} \"$@\"")
    greeting, outcome = _run(remote, tmp_path, [sys.executable, "-c", code])
    assert greeting.versions["torch"].startswith("2.")
    assert outcome.code == wanted
    assert bool(outcome.first) == bool(wanted)


def test_a_host_that_goes_after_its_greeting_is_a_failure(tmp_path: Path) -> None:
    remote = _remote(tmp_path, f'exec {sys.executable} "$@" < /dev/null')
    _, outcome = _run(remote, tmp_path, [sys.executable, "-c", "pass"])
    assert outcome.code == 1
    assert outcome.first is not None
    assert outcome.first.text == "its supervisor ended"


def test_a_program_that_does_not_start_is_told_from_a_silent_host(tmp_path: Path) -> None:
    with Attempt([HERE], _remote(tmp_path, "echo no such thing >&2; exit 7"), TIMEOUTS) as attempt:
        check = attempt.greetings()[HERE]
        assert isinstance(check, Check)
        assert (check.name, check.host, check.found) == ("python", "localhost", "exit code 7: no such thing")
    with Attempt(
        [HERE], _remote(tmp_path, "cat > /dev/null"), TIMEOUTS.model_copy(update={"greeting_seconds": 0.5})
    ) as attempt:
        check = attempt.greetings()[HERE]
        assert isinstance(check, Check)
        assert check.found.startswith("no answer in time")
        assert "launch.greeting_seconds" in check.hint
    with Attempt([HERE], _remote(tmp_path, "exec cat > /dev/null"), TIMEOUTS) as attempt:
        check = attempt.greetings()[HERE]
        assert isinstance(check, Check), "its output is closed, and it goes on"
        assert check.found.startswith("no answer in time")


def test_every_process_with_a_tag_has_ended_when_that_is_reported() -> None:
    """One with much memory, which the kernel takes a while to take back, and one whose parent has left it."""
    tag = f"test.{os.getpid()}.{time.time_ns()}"
    big = "import time; held = bytearray(400_000_000); print('up', flush=True); time.sleep(100)"
    beside = {**os.environ, TAG_VARIABLE: tag}
    started = subprocess.Popen([sys.executable, "-c", big], env=beside, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.readline() == b"up\n"
    subprocess.run(["sh", "-c", "setsid sleep 100 & exit"], env=beside, check=True)
    until = time.monotonic() + 120
    seen: set[int] = set()
    # The environment of a process reads as empty while it executes a new program, as the second does twice.
    while len(seen) < 2 and time.monotonic() < until:
        seen.update(tagged_processes([tag]))
        time.sleep(0.01)
    assert len(seen) == 2
    assert kill_tagged(["another", tag]) == 0
    assert (
        started.poll() is not None or Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )
    assert tagged_processes([tag]) == []
    started.wait()


def test_a_screen_that_is_gone_or_stopped_holds_up_nobody() -> None:
    shown = []

    def show(line: str) -> None:
        shown.append(line)
        raise BrokenPipeError

    began = time.monotonic()
    with closing(LineThread(partial(show_if_open, show))) as screen:
        for number in range(1000):
            screen.put(str(number))
    assert shown == ["0"]
    assert time.monotonic() - began < 60


def test_a_reader_that_leaves_does_not_end_a_launch(tmp_path: Path) -> None:
    """`launch ... | head`: what follows is not shown, and the run is done."""
    task = tiny_task(tmp_path)
    command = f"{sys.executable} -m ds_finetune launch {task} --nproc 1; echo $? > {tmp_path}/code"
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", f"({command}) | head -1"], env=environ, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "code").read_text() == "0\n"
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
