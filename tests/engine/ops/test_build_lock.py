"""A lock on a folder of compiled operators: reported while it is held, and removed where its holder has died."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ds_finetune.engine.ops import build_lock
from ds_finetune.engine.ops.build_lock import reported_lock
from ds_finetune.errors import ConfigError

_HOLD = """
import sys, time
from torch.utils import cpp_extension
from ds_finetune.engine.ops.build_lock import reported_lock
with reported_lock(lambda line: None):
    baton = cpp_extension.FileBaton(sys.argv[1])
    assert baton.try_acquire()
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_lock, "_PAUSE", 0.01)
    monkeypatch.setattr(build_lock, "FIRST_REPORT_SECONDS", 0.0)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "fused_adam"
    folder.mkdir()
    return folder / "lock"


@pytest.fixture
def holder(lock: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that compiles."""
    command = [sys.executable, "-c", _HOLD, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_process_that_compiles_is_named_and_waited_for(lock: Path, holder: "subprocess.Popen[str]") -> None:
    """It is killed, as a run is that somebody ends, and the lock is taken over."""
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        holder.kill()

    with reported_lock(say):
        baton = cpp_extension.FileBaton(str(lock))
        assert baton.try_acquire()
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
        (lock.parent / "fused_adam.so").touch()
        baton.release()
    assert not lock.exists()
    assert lines[0].startswith(f"waiting for DeepSpeed's fused_adam, which process {holder.pid} on ")
    assert lines[0].endswith(f" compiles; it holds {lock}")
    removed, begins, ends = (line for line in lines if not line.startswith("waiting"))
    assert f"{lock} was left by process {holder.pid} on " in removed
    assert begins == f"compiling DeepSpeed's fused_adam in {lock.parent}, which takes minutes the first time"
    assert ends.startswith("compiled DeepSpeed's fused_adam in ")
    assert cpp_extension.FileBaton is FileBaton


def test_a_lock_of_a_process_that_compiles_is_never_removed(
    lock: Path, holder: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has been quiet."""
    monkeypatch.setattr(build_lock, "REPORT_SECONDS", 0.0)
    past = time.time() - build_lock.QUIET_SECONDS - 1
    reports = 0

    def say(_: str) -> None:
        nonlocal reports
        os.utime(lock, (past, past))
        reports += 1
        if reports == 3:
            raise KeyboardInterrupt

    with reported_lock(say), pytest.raises(KeyboardInterrupt):
        cpp_extension.FileBaton(str(lock)).try_acquire()
    assert lock.read_text().startswith(f"process {holder.pid} on ")


def test_a_program_with_torchs_own_lock_is_waited_for(lock: Path) -> None:
    other = FileBaton(str(lock))
    assert other.try_acquire()
    with reported_lock(lambda text: other.release() if "waiting" in text else None):
        assert cpp_extension.FileBaton(str(lock)).try_acquire()


def test_a_lock_of_another_program_is_never_removed(lock: Path) -> None:
    lock.touch()
    past = time.time() - build_lock.QUIET_SECONDS - 1
    os.utime(lock, (past, past))
    lines: list[str] = []
    with reported_lock(lines.append), pytest.raises(ConfigError) as caught:
        cpp_extension.FileBaton(str(lock)).try_acquire()
    assert (
        f"{lock} is held by a process of another program, and nothing has changed beside it for 10 minutes"
        in caught.value.message
    )
    assert caught.value.hint == f"remove {lock} if no process compiles in this folder any more"
    assert "waiting for DeepSpeed's fused_adam, which a process of another program compiles" in lines[0]
    assert lock.exists()
