"""`train.micro_batch_size: auto`: what is tried, on which all ranks agree, and what is remembered; and runs without
memory.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.data.documents import Documents, KeptDocument
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.observers.performance import MEASURED_STEPS
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.fitting import chosen_recomputation, legal_sizes
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import AccelerateChoices, World
from ds_finetune.trainer import trial_process
from ds_finetune.trainer.forecast import forecast_lines
from ds_finetune.trainer.micro_batch import trial_section
from ds_finetune.trainer.prepare import prepare_run
from ds_finetune.trainer.resolve import ResolvedRun, resolve_here
from ds_finetune.trainer.trial import DONE, END, ENDED, FAILED, OUT_OF_MEMORY, TrialEnd, judge, longest_rows, rows_again
from tests.forks import Forkserver
from tests.json_files import change_json
from tests.launched import SOCKET
from tests.running import SECONDS, metrics, start, tiny_task, torchrun
from tests.sums_task import sums_task

_NO_FILES = {"checkpoint": {"every": "never"}, "export": {"at_end": False}}


def _losses(folder: Path) -> list[float]:
    return [record["train/loss"] for record in metrics(folder)]


def _plan_text(folder: Path) -> str:
    text: str = json.loads((folder / "run" / "plan.json").read_text())["micro batch"]
    return text


def test_auto_trains_like_a_fixed_micro_batch(tmp_path: Path) -> None:
    """Two ranks try four rows and agree; one rank with single rows has the same losses. What was predicted is compared
    with what 20 steps measured.
    """
    steps = f"{MEASURED_STEPS} steps"
    run_file = tiny_task(tmp_path, train={"micro_batch_size": "auto", "for": steps}, **_NO_FILES)
    # The trials are forks too.
    forked = {SOCKET: Forkserver.get().address}
    done = start(torchrun("ds_finetune/train.py", str(run_file)), forked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trying train.micro_batch_size 4: " in done.stdout
    assert _plan_text(tmp_path).startswith("4 (auto: tried on the longest rows, ")
    assert re.search(r"memory of a rank +0\.00\d GiB at most of ", done.stdout)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("after 20 steps: ")]
    assert re.fullmatch(
        r".*memory of the fullest rank 0\.00\d GiB predicted for tensors; its process grew by 0\.\d+ GiB, .*", line
    )
    last = metrics(tmp_path)[MEASURED_STEPS - 1]
    assert 0 < last["memory/predicted_gib"] < last["memory/measured_gib"] < last["memory/peak_gib"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "GiB  moments" in log
    assert line in log
    auto = _losses(tmp_path)
    [remembered] = (tmp_path / "cache" / "micro-batch").glob("*.json")
    assert json.loads(remembered.read_text())["rows"] == 4
    fixed = ["train.micro_batch_size=1", f"output_dir={tmp_path / 'fixed' / 'run'}"]
    done = start(["ds-finetune", "train", str(run_file), *fixed])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(auto) == MEASURED_STEPS
    assert auto == pytest.approx(_losses(tmp_path / "fixed"), rel=1e-6)


@pytest.mark.slow
def test_a_second_start_and_a_resume_try_nothing(tmp_path: Path) -> None:
    """Another length, seed, learning rate and folder ask for no trial; another precision does, in real processes."""
    run_file = tiny_task(tmp_path, train={"micro_batch_size": "auto"})
    first = start(["ds-finetune", "train", str(run_file)], fork=False)
    assert first.returncode == 0, first.stdout + first.stderr
    changed = ["train.seed=7", "train.for=4 steps", "optim.lr=1e-4", f"output_dir={tmp_path / 'second' / 'run'}"]
    for arguments, tries in (
        (["train.for=5 steps"], False),
        (changed, False),
        ([*changed[:-1], f"output_dir={tmp_path / 'third' / 'run'}", "train.precision=bf16"], True),
    ):
        done = start(["ds-finetune", "train", str(run_file), *arguments])
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("trying" in done.stdout) == tries
    assert _plan_text(tmp_path / "second").startswith("8 (auto: remembered from ")


@pytest.mark.slow
def test_a_killed_trial_means_the_next_smaller_size_on_every_rank(tmp_path: Path) -> None:
    """The kernel kills one rank's process, as it does where the host has no memory; the other rank's hears of it."""
    run_file = tiny_task(tmp_path, train={"micro_batch_size": "auto"}, **_NO_FILES)
    killer = threading.Thread(target=_kill_first_trial, args=(tmp_path,), daemon=True)
    killer.start()
    done = start(torchrun("ds_finetune/train.py", str(run_file)), {"TMPDIR": str(tmp_path)})
    killer.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"train.micro_batch_size 4 ran out of memory \(rank \d: killed by SIGKILL", done.stdout)
    assert "trying train.micro_batch_size 2: " in done.stdout
    assert _plan_text(tmp_path).startswith("2 (auto: tried on the longest rows, ")
    assert "; 4 ran out of memory (rank " in _plan_text(tmp_path)


def _kill_first_trial(folder: Path) -> None:
    """Kill the process of one rank's trial, whose folder for temporary files is `folder`."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                is_trial = words[1:3] == [b"-m", b"ds_finetune.trainer.trial_process"]
                if is_trial and os.fsencode(folder) in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    return
        time.sleep(0.05)


@pytest.mark.slow
def test_no_memory_on_several_ranks_is_one_error(tmp_path: Path) -> None:
    """Beside it a thread may fail that finds no memory either, since the limit holds for the whole process."""
    run_file = _wide_task(tmp_path, ranks=2)
    worker = str(Path(__file__).with_name("limited_worker.py"))
    done = start(torchrun(worker, "900", str(run_file)))
    assert done.returncode != 0
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1
    assert "ran out of memory: " in done.stderr


def test_the_longest_rows_are_tried() -> None:
    lengths = enumerate([3, 9, 5, 9, 9])
    documents = Documents.of([KeptDocument(range(length), [number != 1] * length) for number, length in lengths])
    rows = PreparedRows(documents, np.array([4, 3, 2, 1, 0]), np.array([0, 1, 2, 3, 5]), documents.counts)
    # The last row has two documents, of 9 and 3 tokens; rows of the same length stay in order.
    assert longest_rows(rows, 3).tolist() == [3, 0, 1]
    again = rows_again(rows, np.array([3, 1, 3]))
    assert [again[number].num_tokens for number in range(len(again))] == [12, 9, 12]


@dataclass
class _TriedRun:
    plan: SimpleNamespace
    model: None = None
    peak: None = None


@pytest.mark.parametrize("where", ["start", "step"])
def test_a_trial_reports_before_it_leaves_its_groups(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving the groups of a rank without memory hangs where the others are in a collective (NCCL)."""

    @contextlib.contextmanager
    def hangs_at_the_end(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            os._exit(3)

    def run_out(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial_process, "process_group", hangs_at_the_end)
    monkeypatch.setattr(trial_process, "start_engine", run_out if where == "start" else hangs_at_the_end)
    monkeypatch.setattr(trial_process, "trial_batches", run_out)
    for name in ("build_ops", "use_cores"):
        monkeypatch.setattr(trial_process, name, lambda plan, *_: plan)
    plan = SimpleNamespace(world=World(0, 1, 0, 1, "t"), device="cpu", watchdog=SimpleNamespace(collective_seconds=9))
    pid = os.fork()
    if not pid:
        trial_process._peak_of_steps(_TriedRun(plan), "t", tmp_path)  # type: ignore[arg-type]
        os._exit(4)
    assert os.waitpid(pid, 0) == (pid, 0)
    end = TrialEnd(**json.loads((tmp_path / END).read_text()))
    assert end == TrialEnd(OUT_OF_MEMORY, error="CUDA out of memory")


def test_the_trial_of_all_ranks() -> None:
    done = TrialEnd(DONE, peak_bytes=10)
    lost = TrialEnd(FAILED, error="Connection closed by peer", is_secondary=True)
    assert judge([done, replace(done, peak_bytes=12)]) == TrialEnd(DONE, peak_bytes=12)
    killed = judge([lost, TrialEnd(OUT_OF_MEMORY, error="killed"), TrialEnd(ENDED, error="ended")])
    assert (killed.outcome, killed.error) == (OUT_OF_MEMORY, "rank 1: killed")
    wrong = judge([lost, TrialEnd(FAILED, error="a bug"), done])
    assert (wrong.outcome, wrong.error) == (FAILED, "rank 1: a bug")


def _plan(accelerate: AccelerateChoices | None = None, **deepspeed: object) -> Plan:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "deepspeed": deepspeed}
    train = {"micro_batch_size": "auto", "global_batch_size": 24}
    config = RunConfig.model_validate(tree | {"train": train})
    return make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "torchrun"), device="cpu", accelerate=accelerate)


def test_a_plan_for_an_undecided_micro_batch_has_the_smallest() -> None:
    plan = _plan(train_micro_batch_size_per_gpu="auto")
    assert (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps) == (1, 12)
    assert dict(plan.decisions)["batch"].startswith("24 rows = micro x accumulation x dp 2, micro as large as fits")


def test_sizes_and_trials_have_whole_groups_of_forwards_where_ranks_have_several_chunks() -> None:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "parallel": {"pp": 3, "vpp": 2}}
    tree["deepspeed"] = {"zero_optimization": {"stage": 1}}
    config = RunConfig.model_validate(tree | {"train": {"micro_batch_size": "auto", "global_batch_size": 36}})
    world = World(0, 3, 0, 3, "torchrun")
    plan = make_plan(RunSettings.of(config), world=world, device="cpu")
    assert legal_sizes(plan) == (1, 2, 3, 4, 6, 12)
    settings, run = RunSettings.of(config), ResolvedRun(config, plan, None)  # type: ignore[arg-type]
    trials = [replace(settings, train=trial_section(run, rows)) for rows in legal_sizes(plan)]
    forwards = [make_plan(trial, world=world, device="cpu").batch.gradient_accumulation_steps for trial in trials]
    assert forwards == [6, 6, 6, 6, 6, 3]


@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_size_in_deepspeeds_file_contradicts_auto(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} 12 contradicts train.micro_batch_size auto"):
        _plan(**{key: 12})


def test_accumulation_of_accelerate_contradicts_auto() -> None:
    choices = AccelerateChoices(None, None, None, None, 12, None, None)
    with pytest.raises(ConfigError, match=r"accelerate's gradient_accumulation_steps 12 contradicts .* auto"):
        _plan(choices)


@pytest.mark.parametrize("size", ["0", "-2", "1.5", "many", "true"])
def test_a_micro_batch_is_a_number_or_auto(size: str, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"model: m\ndata: {{train: t}}\noutput_dir: o\ntrain: {{micro_batch_size: {size}}}\n")
    with pytest.raises(ConfigError, match="a whole number of at least 1, or `auto`"):
        read_config(run_file)


def test_no_memory_in_a_step_is_explained(tmp_path: Path) -> None:
    """A real limit of the address space, of which a step with all activations kept needs more, whatever of it the
    preparation of the run has taken.
    """
    run_file, limit_mib = _wide_task(tmp_path, ranks=1), 1200
    worker = str(Path(__file__).with_name("limited_worker.py"))
    done = start([sys.executable, worker, str(limit_mib), str(run_file)])
    assert done.returncode == 1, done.stdout + done.stderr
    errors = " ".join(done.stderr.split())
    assert "error: rank 0 ran out of memory: " in errors
    assert "Traceback" not in errors
    found = re.search(r"by the estimate a rank needs (\d\.\d+) GiB at most, and the CPU had (\d\.\d+) GiB free", errors)
    assert found is not None, errors
    assert float(found[1]) > limit_mib / 1024 > float(found[2])
    assert re.search(r"\d\.\d{3} GiB kept by layers \(lowered by train.activation_checkpointing\)", errors)
    assert re.search(r"hint: by the estimate these fit, each with its need: train.micro_batch_size [48] \(0", errors)
    assert "train.activation_checkpointing full (" in errors


def test_a_bucket_beyond_the_address_space_is_named(tmp_path: Path) -> None:
    """ZeRO's bucket is one piece of 2e9 bytes, of which the resident memory has little."""
    run_file = tiny_task(tmp_path, deepspeed={"zero_optimization": {"stage": 1}}, export={"at_end": False})
    worker = str(Path(__file__).with_name("limited_worker.py"))
    done = start([sys.executable, worker, "1500", str(run_file)])
    assert done.returncode == 1, done.stdout + done.stderr
    errors = " ".join(done.stderr.split())
    assert "you tried to allocate 2000000000 bytes" in errors
    assert "under `ulimit -v` the bucket of ZeRO-1 counts in full, 2,000,000,000 bytes in one piece" in errors
    smaller = "deepspeed.zero_optimization.reduce_bucket_size=10000000"
    assert smaller.replace("=", " to ") in errors
    again = start([sys.executable, worker, "1500", str(run_file), smaller])
    assert again.returncode == 0, again.stderr


def _wide_task(folder: Path, *, ranks: int) -> Path:
    """Rows of 512 tokens in a model of six layers, all of whose activations are kept."""
    run_file = tiny_task(
        folder,
        train={"micro_batch_size": 16, "global_batch_size": 16 * ranks, "max_seq_len": 512},
        data={"packing": True, "eval": []},
        deepspeed={"zero_optimization": {"stage": 0}},
    )
    config = folder / "model" / "config.json"
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    change_json(config, wide)
    return run_file


def test_sampled_answers_are_tried_as_full_rows(tmp_path: Path) -> None:
    run_file = sums_task(tmp_path, train={"micro_batch_size": "auto", "for": "1 steps"}, **_NO_FILES)
    done = start(["ds-finetune", "train", str(run_file)], {SOCKET: Forkserver.get().address})
    assert done.returncode == 0, done.stdout + done.stderr
    # Four answers to each of four prompts.
    assert "trying train.micro_batch_size 16: " in done.stdout
    assert _plan_text(tmp_path).startswith("16 (auto: tried on the longest rows, ")
    assert len(_losses(tmp_path)) == 1


def test_a_run_says_why_its_memory_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve_here(read_config(tiny_task(tmp_path)), World(0, 1, 0, 1, "a test"))

    def fail(plan: Plan) -> NoReturn:
        raise ModelError("the activations of M cannot be traced: KeyError", hint="")

    monkeypatch.setattr(ResolvedRun, "traces", staticmethod(fail))
    prepared = prepare_run(run)
    assert ("memory of a rank", "not known: the activations of M cannot be traced: KeyError") in forecast_lines(
        prepared
    )
    gpu = replace(prepared.plan, device="cuda")
    chosen = chosen_recomputation(gpu, prepared.model.described, fail, budget=2**30)
    assert chosen == ("full", "its memory is not known: the activations of M cannot be traced: KeyError")
