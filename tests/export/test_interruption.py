"""A signal during a verification gives a non-zero exit code, names the unverified folders, and leaves no process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_finetune.config.schema import read_config
from ds_finetune.errors import VerificationError
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.export.verify.verify import SignalInterruption, verify_exports
from ds_finetune.trainer.exports import verify_run_exports
from tests.conftest import ROOT
from tests.export.test_verify import _exported
from tests.running import start, tiny_task
from tests.verifying import ADDRESS

SECONDS = 300


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _exported("llama", tmp_path_factory.mktemp("interruption"))


@pytest.fixture(autouse=True)
def _no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started as the package starts them."""
    monkeypatch.delenv(ADDRESS)


def _verifying(pid: int) -> list[int]:
    """The verifying processes that process `pid` has started and that already run their own program."""
    return [
        child for child in _children(pid) if b"plain_transformers.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _await(found: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < until
        time.sleep(0.02)


def _is_there(pid: int) -> bool:
    """False also for a process that has ended and that its new parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class _Signalled:
    """As DeepSpeed's engine: its destructor runs while the signal arrives."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            time.sleep(0)


def _signal_in_a_destructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    found = [_Signalled()]
    found.clear()


def test_a_signal_within_a_destructor_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), SignalInterruption(signal.SIGINT):
        _signal_in_a_destructor(monkeypatch)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_verifies_nothing_after_a_signal_lost_while_its_engine_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(str(tiny_task(tmp_path, export={"verify": True})), [])
    out = Path(config.output_dir) / "export"
    out.mkdir(parents=True)
    for name in (RECORD, UNVERIFIED):
        (out / name).write_text("{}")
    said = f"SIGINT ended the verification: these folders are complete but not verified: {out}"
    with pytest.raises(VerificationError, match=said), SignalInterruption(signal.SIGINT) as interruption:  # noqa: PT012 - the signal is part of it
        _signal_in_a_destructor(monkeypatch)
        verify_run_exports(out.parent, (out,), interruption)


def test_a_signal_while_the_folder_is_loaded_names_it(exported: Path) -> None:
    def interrupt() -> None:
        _await(lambda: _verifying(os.getpid()))
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(
        VerificationError,
        match=f"SIGINT ended the verification: these folders are complete but not verified: {exported}",
    ) as caught:
        verify_exports([exported])
    thread.join()
    assert caught.value.exit_code == 1
    assert caught.value.hint == f"verify them: ds-finetune export --check {exported}"
    _await(lambda: not _verifying(os.getpid()))
    assert "not checked yet" in (exported / UNVERIFIED).read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_verifying_process_ends_with_the_command(number: signal.Signals, exported: Path) -> None:
    command = [sys.executable, "-m", "ds_finetune", "export", "--check", str(exported)]
    checking = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    _await(lambda: _verifying(checking.pid))
    (child,) = _verifying(checking.pid)
    time.sleep(0.5)
    checking.send_signal(number)
    _, said = checking.communicate(timeout=SECONDS)
    _await(lambda: not _is_there(child))
    assert checking.returncode == (1 if number == signal.SIGTERM else -number)
    assert (
        number == signal.SIGKILL
        or f"SIGTERM ended the verification: these folders are complete but not verified: {exported}" in said
    )


_LOSING = """
import os, signal, sys
from deepspeed.runtime.engine import DeepSpeedEngine
before = DeepSpeedEngine.__del__
def interrupted(engine):
    os.kill(os.getpid(), signal.SIGINT)
    before(engine)
DeepSpeedEngine.__del__ = interrupted
from ds_finetune.cli.main import run_and_exit
run_and_exit(["train", sys.argv[1]])
"""


def test_ctrl_c_as_the_engine_closes_ends_the_run(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path, export={"verify": True})
    program = tmp_path / "losing.py"
    program.write_text(_LOSING)
    done = start([sys.executable, str(program), str(run_file)])
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        f"SIGINT ended the verification: these folders are complete but not verified: {tmp_path}/run/export"
        in done.stderr
    )
