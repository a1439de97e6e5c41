"""A lock on a folder of compiled operators: reported while it is held, and removed where its holder has certainly died."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ds_finetune.engine.ops import build_lock
from ds_finetune.engine.ops.build_lock import holder_of, reported_lock
from ds_finetune.errors import ConfigError
from ds_finetune.system.processes import began_at

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processes are read from /proc")
OTHER = {"pid": 7, "host": "node7", "machine": "another boot pid:[1]", "started": "1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_lock, "_PAUSE", 0.01)
    monkeypatch.setattr(build_lock, "FIRST_REPORT_SECONDS", 0.0)


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def _record(**fields: object) -> str:
    return json.dumps(json.loads(build_lock._own_record()) | fields)


def test_the_lock_of_a_dead_process_is_removed(tmp_path: Path, ended: int) -> None:
    lock, said = tmp_path / "lock", []
    lock.write_text(_record(pid=ended))
    with reported_lock("cpu_adam", said.append):
        baton = cpp_extension.FileBaton(str(lock))
        assert baton.try_acquire()
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        baton.release()
    assert not lock.exists()
    assert "was left by process" in said[0]
    assert said[1] == f"compiling DeepSpeed's cpu_adam in {tmp_path}, which takes minutes the first time"
    assert cpp_extension.FileBaton is FileBaton


def test_a_process_with_the_number_of_a_dead_one_does_not_hold_its_lock(
    tmp_path: Path, running: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "lock").write_text(_record(pid=running.pid, started="1"))
    holder = holder_of(tmp_path / "lock")
    assert holder is not None
    assert holder.is_dead


def test_the_holder_that_compiles_is_named_and_waited_for(tmp_path: Path, running: subprocess.Popen[bytes]) -> None:
    """It is killed, as a run is that somebody ends, and the lock is taken over."""
    lock, said = tmp_path / "lock", []
    lock.write_text(_record(pid=running.pid, started=began_at(running.pid)))

    def say(text: str) -> None:
        said.append(text)
        running.kill()

    with reported_lock("fused_adam", say):
        assert cpp_extension.FileBaton(str(lock)).try_acquire()
    assert said[0].startswith(f"waiting for DeepSpeed's fused_adam, which process {running.pid} on ")
    assert said[0].endswith(f" compiles; it holds {lock}")
    assert f"was left by process {running.pid} on " in said[1]


def test_what_another_process_has_built_meanwhile_is_loaded(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(json.dumps(OTHER))

    def build(_: str) -> None:
        (tmp_path / "cpu_adam.so").touch()
        lock.unlink()

    with reported_lock("cpu_adam", build):
        assert not cpp_extension.FileBaton(str(lock)).try_acquire()


def test_a_lock_of_another_host_is_never_removed(tmp_path: Path) -> None:
    lock, said = tmp_path / "lock", []
    lock.write_text(json.dumps(OTHER))
    past = time.time() - build_lock.QUIET_SECONDS - 1
    os.utime(lock, (past, past))
    with reported_lock("cpu_adam", said.append), pytest.raises(ConfigError) as caught:
        cpp_extension.FileBaton(str(lock)).try_acquire()
    assert (
        f"{lock} is held by process 7 on node7, and nothing has changed beside it for 10 minutes"
        in caught.value.message
    )
    assert caught.value.hint == f"remove {lock} if nothing compiles there any more"
    assert "waiting for DeepSpeed's cpu_adam, which process 7 on node7 compiles" in said[0]
    assert lock.exists()


def test_a_lock_without_a_record_is_held_by_who_has_it_open(tmp_path: Path) -> None:
    """As plain torch writes it."""
    baton = FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    holder = holder_of(tmp_path / "lock")
    assert holder is not None
    assert (holder.is_alive, holder.is_dead) == (True, False)
    assert holder.name.startswith(f"process {os.getpid()} on ")
    baton.release()
    assert holder_of(tmp_path / "lock") is None


@pytest.mark.parametrize(
    ("file_system", "namespace", "is_dead"), [("ext4", True, True), ("nfs4", True, False), ("ext4", False, False)]
)
def test_a_lock_without_a_record_is_dead_only_where_every_process_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, namespace: bool, is_dead: bool
) -> None:
    """Not on a shared file system, and not in a container beside which another may compile."""
    (tmp_path / "lock").touch()
    # A sandbox may hide what its first process has open, and then nothing is certain.
    monkeypatch.setattr(build_lock, "_has_open", lambda process, status: False)
    monkeypatch.setattr(
        build_lock.psutil, "disk_partitions", lambda **_: [SimpleNamespace(mountpoint="/", fstype=file_system)]
    )
    own = str(Path("/proc/self/ns/pid").readlink())
    monkeypatch.setattr(build_lock, "_FIRST_PID_NAMESPACE", own if namespace else "pid:[1]")
    holder = holder_of(tmp_path / "lock")
    assert holder is not None
    assert holder.is_dead == is_dead
