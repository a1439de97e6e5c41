"""A run that was killed, signalled or starved goes on as if nothing had happened."""

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.checkpoint.commit import complete_steps, step_name
from ds_finetune.checkpoint.locking import LOCK, lock_folder
from ds_finetune.checkpoint.tools import verify_checkpoint
from ds_finetune.errors import CheckpointError, OutputError
from ds_finetune.observers.stopping import StopSignals
from tests.checkpoint.runs import Running, numbers
from tests.conftest import ROOT
from tests.running import tiny_task

ZERO3 = {"zero_optimization": {"stage": 3}}
LONG: dict[str, Any] = {
    "for": "3 epochs",
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "max_seq_len": 64,
    "precision": "fp32",
}
"""24 steps over 32 rows, 8 to an epoch."""


def task(folder: Path, *, packing: bool = False, **sections: Any) -> Path:
    """A run over three epochs that saves at every step."""
    every = {
        "checkpoint": {"every": "1 steps"},
        "deepspeed": ZERO3,
        "train": LONG,
        "data": {"packing": packing},
        "export": {"at_end": False},
        "router": {"balance": 0.01, "bias_update": 0.01},
    }
    return tiny_task(folder, **{**every, **sections})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The numbers of a whole run."""
    run = Running(task(tmp_path_factory.mktemp("whole") / "t", packing=True))
    assert run.finish() == 0, run.text[-4000:]
    return numbers(run.folder)


def test_two_kills_leave_no_trace_in_the_numbers(tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """Killed in the middle of the first epoch and beyond its end, packed; every number of every step is the same bits."""
    run_file = task(tmp_path / "t", packing=True)
    steps = len(uninterrupted)
    for until in (steps // 5, steps // 2):
        run = Running(run_file)
        run.wait_for(lambda run=run, until=until: run.steps >= until)  # type: ignore[misc]
        run.kill()
        assert run.steps < steps, "it ended before it was killed"
    run = Running(run_file)
    assert run.finish() == 0, run.text[-4000:]
    assert "resuming from" in run.text
    assert numbers(run.folder) == uninterrupted


def test_a_signal_to_one_rank_saves_on_all_and_leaves(tmp_path: Path, uninterrupted: list[dict[str, Any]]) -> None:
    run_file = task(tmp_path / "t", packing=True, checkpoint={"every": "1000 steps"})
    run = Running(run_file)
    run.wait_for(lambda: run.steps >= 1)
    os.kill(run.ranks()[1], signal.SIGTERM)
    assert run.finish() != 0
    assert "exitcode  : 3" in run.text
    assert "a signal to another rank: saved at step" in run.text
    assert complete_steps(run.folder / "checkpoints") == [run.steps]
    again = Running(run_file)
    assert again.finish() == 0, again.text[-4000:]
    assert numbers(again.folder) == uninterrupted


def test_a_signal_before_the_first_step_and_one_in_evaluation(tmp_path: Path) -> None:
    often = {"every": "1 steps", "keep_best": False, "generate": {"prompts": 10, "max_new_tokens": 40}}
    run_file = task(tmp_path / "t", checkpoint={"every": "1000 steps"}, eval=often)
    early = Running(run_file, ranks=1)
    early.wait_for(lambda: "rewritten" in early.text or "data  " in early.text)
    time.sleep(0.3)
    os.kill(early.process.pid, signal.SIGTERM)
    assert early.finish() in (3, -signal.SIGTERM), early.text[-3000:]
    assert not complete_steps(early.folder / "checkpoints") or early.steps
    before = early.steps
    inside = Running(run_file, ranks=1)
    inside.wait_for(lambda: inside.steps > before)
    # The next step takes milliseconds and its evaluation seconds.
    time.sleep(0.5)
    os.kill(inside.process.pid, signal.SIGUSR1)
    assert inside.finish() == 3, inside.text[-3000:]
    assert complete_steps(inside.folder / "checkpoints")[-1] == inside.steps
    cut = inside.steps
    assert "eval/loss" not in (inside.folder / "metrics.jsonl").read_text().splitlines()[-1]
    again = Running(run_file, f"train.for={cut + 1} steps", "eval.generate.max_new_tokens=2", ranks=1)
    assert again.finish() == 0, again.text[-3000:]
    records = [json.loads(line) for line in (again.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, cut + 2))
    assert all("eval/exact_match" in record for record in records)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_ctrl_c_and_a_closed_terminal_save_and_say_that_the_same_command_resumes(name: str, tmp_path: Path) -> None:
    run = Running(task(tmp_path / "t", checkpoint={"every": "1000 steps"}), ranks=1)
    run.wait_for(lambda: run.steps >= 1)
    os.kill(run.process.pid, signal.Signals[name])
    assert run.finish() == 3, run.text[-3000:]
    assert f"{name}: saving a checkpoint at the end of this step" in run.text
    assert f"{name}: saved at step {run.steps}; the same command resumes from there" in run.text
    assert complete_steps(run.folder / "checkpoints") == [run.steps]


def test_checkpoints_are_saved_by_time_on_all_ranks_at_the_same_steps(tmp_path: Path) -> None:
    """A save is due after each step, and rank 1 has the same steps as rank 0: else no checkpoint would be complete."""
    saved = {"every": "1000 steps or 0.001 seconds", "keep": 100, "asynchronous": False}
    run = Running(task(tmp_path / "t", checkpoint=saved, train=LONG | {"for": "6 steps"}))
    assert run.finish() == 0, run.text[-3000:]
    assert "every 1000 steps or 0.001 seconds" in run.text
    assert complete_steps(run.folder / "checkpoints") == list(range(1, 7))


def test_a_second_ctrl_c_ends_at_once_and_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
            _wait_until(lambda: bool(signals.name))
            assert signals.name == "SIGINT"
            signals._since -= 0.6
            signal.raise_signal(signal.SIGINT)
            _wait_until(lambda: bool(codes))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert codes == [128 + signal.SIGINT]


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


WAITING = """
import datetime, time
import torch.distributed as dist
from ds_finetune.observers.stopping import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    # As a rank waits for one that is gone: in C++, where no handler of Python's runs.
    dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"], datetime.timedelta(seconds=60))
"""


def test_a_second_signal_leaves_at_once_and_an_echo_does_not() -> None:
    waiting = subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, stdout=subprocess.PIPE)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == b"ready\n"
    for _ in range(2):
        waiting.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert waiting.poll() is None
    time.sleep(2.2)
    waiting.send_signal(signal.SIGUSR1)
    assert waiting.wait(timeout=50) == 128 + signal.SIGUSR1


def _crash(run_file: Path, rng: random.Random, done: int) -> tuple[int, int]:
    """Start, kill one rank or all at a random moment of training, and return steps recorded and the newest checkpoint."""
    run = Running(run_file)
    run.wait_for(lambda: run.has_written and run.steps > done)
    time.sleep(rng.uniform(0, 0.6))
    if rng.random() < 0.5:
        os.kill(rng.choice(run.ranks()), signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.2))
    run.kill()
    return run.steps, max(complete_steps(run.folder / "checkpoints"), default=0)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments_lose_one_interval_at_most(kills: int, tmp_path: Path) -> None:
    rng = random.Random(5)
    run_file = task(tmp_path / "t", train=LONG | {"for": "100000 steps"}, log={"every": 1000, "trackers": []})
    done = 0
    for number in range(kills):
        steps, saved = _crash(run_file, rng, done)
        assert saved >= steps - 1, (
            f"kill {number}: {steps} steps were done and the newest checkpoint is of step {saved}"
        )
        assert saved >= done, f"kill {number}: nothing was won since step {done}"
        done = saved
    run = Running(run_file, f"train.for={done + 2} steps")
    assert run.finish() == 0, run.text[-4000:]
    assert [record["step"] for record in numbers(run.folder)] == list(range(1, done + 3))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_loudly_and_the_run_goes_on(tmp_path: Path, small_disk: Path) -> None:
    run_file = task(tmp_path / "t", train=LONG | {"for": "100000 steps"}, log={"every": 1000, "trackers": []})
    (tmp_path / "t" / "run").mkdir()
    (tmp_path / "t" / "run" / "checkpoints").symlink_to(small_disk)
    run = Running(run_file, "checkpoint.max_failed=1000000")
    run.wait_for(lambda: run.steps >= 3)
    filler = small_disk / "filler"

    def is_said() -> bool:
        """Take what older checkpoints give back as well, until one cannot be written."""
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        return "WAS NOT WRITTEN" in run.text

    run.wait_for(is_said)
    before = run.steps
    run.wait_for(lambda: run.steps > before + 2)
    assert "No space left on device" in run.text
    kept = complete_steps(small_disk)
    assert kept
    assert verify_checkpoint(small_disk / step_name(kept[-1]), workers=1)
    filler.unlink()
    run.wait_for(lambda: complete_steps(small_disk)[-1] > kept[-1] + 1)
    os.kill(run.ranks()[0], signal.SIGTERM)
    run.finish()
    assert complete_steps(small_disk)[-1] == run.steps


@pytest.mark.parametrize(
    ("steps", "said"), [("100000 steps", "3 checkpoints in a row were not written"), ("6 steps", "training finished")]
)
def test_a_run_that_cannot_save_any_more_does_not_end_well(
    tmp_path: Path, small_disk: Path, steps: str, said: str
) -> None:
    run_file = task(
        tmp_path / "t", train=LONG | {"for": steps}, checkpoint={"every": "1 steps" if "00" in steps else "5 steps"}
    )
    (tmp_path / "t" / "run").mkdir()
    (tmp_path / "t" / "run" / "checkpoints").symlink_to(small_disk)
    run = Running(run_file)
    run.wait_for(lambda: run.steps >= 1)
    while run.process.poll() is None:
        with contextlib.suppress(OSError), (small_disk / "filler").open("ab", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        time.sleep(0.05)
    assert run.finish() == 1, run.text[-3000:]
    assert said in run.text
    assert "No space left on device" in run.text


def test_a_disk_that_takes_nothing_ends_the_run_before_it_loads(tmp_path: Path, small_disk: Path) -> None:
    run_file = task(tmp_path / "t")
    (tmp_path / "t" / "run").mkdir()
    (tmp_path / "t" / "run" / "checkpoints").symlink_to(small_disk)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    run = Running(run_file, ranks=1)
    assert run.finish() == 2, run.text[-3000:]
    assert "No space left on device" in run.text
    assert "repair the folder or its disk" in run.text
    assert run.steps == 0


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run of which four checkpoints are left and steps are still to do."""
    run_file = task(tmp_path_factory.mktemp("stopped") / "t", checkpoint={"every": "1 steps", "keep": 4})
    run = Running(run_file, "train.for=4 steps", ranks=1)
    assert run.finish() == 0, run.text[-3000:]
    return run_file


def test_a_flipped_byte_in_any_file_is_refused_by_name(stopped: Path) -> None:
    newest = stopped.parent / "run" / "checkpoints" / step_name(4)
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 2):
            file.unlink()
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError) as caught:
                verify_checkpoint(newest, workers=1)
            assert str(file) in caught.value.message
        file.write_bytes(whole)
    assert verify_checkpoint(newest, workers=1)


def test_a_run_that_is_past_its_end_is_refused(stopped: Path) -> None:
    shorter = Running(stopped, "train.for=3 steps", ranks=1)
    assert shorter.finish() == 2, shorter.text[-3000:]
    assert "is of step 4, and train.for 3 steps ends after step 3" in shorter.text


def test_a_second_run_in_the_same_folder_is_refused(stopped: Path) -> None:
    checkpoints = stopped.parent / "run" / "checkpoints"
    with (checkpoints / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("a test")
        file.flush()
        with pytest.raises(OutputError) as caught:
            lock_folder(checkpoints, seconds=0.1, say=lambda text: None)
    assert f"{checkpoints} is in use by another run (a test)" in caught.value.message
    lock_folder(checkpoints, seconds=0.1, say=lambda text: None).close()


def test_auto_passes_over_what_is_damaged_and_a_named_one_is_refused(stopped: Path) -> None:
    folder = stopped.parent / "run" / "checkpoints"
    damaged, unfinished = folder / step_name(4) / "state.json", folder / f"{step_name(9)}.partial-1"
    damaged.write_bytes(damaged.read_bytes().replace(b"0", b"1", 1))
    unfinished.mkdir()
    mine = folder / "step-000002.mine"
    mine.mkdir()
    named = Running(stopped, f"checkpoint.resume={folder / step_name(4)}", ranks=1)
    assert named.finish() == 2
    assert str(damaged) in named.text
    mixed = Running(stopped, f"checkpoint.resume={folder / step_name(2)}", ranks=1)
    assert mixed.finish() == 2
    assert "has later checkpoints: step-000003, step-000004" in mixed.text
    other = Running(stopped, "train.global_batch_size=8", ranks=1)
    assert other.finish() == 2
    assert "train.global_batch_size 4 -> 8" in other.text
    auto = Running(stopped, "train.for=6 steps", "optim.lr=0.5", ranks=1)
    assert auto.finish() == 0, auto.text[-3000:]
    assert f"{damaged.parent} is skipped: {damaged} is damaged" in auto.text
    assert f"{unfinished} is skipped: it was never completed" in auto.text
    assert f"resuming from {folder / step_name(3)}" in auto.text
    assert "changed since the checkpoint: optim.lr" in auto.text
    assert [record["step"] for record in numbers(auto.folder)] == [1, 2, 3, 4, 5, 6]
    assert complete_steps(folder) == [3, 4, 5, 6]
    assert (folder / "step-000004.unusable-1").is_dir()
    assert not unfinished.exists()
    assert mine.is_dir()
