"""`train.micro_batch_size: auto`: what fits by the estimate, and what is remembered; and runs without memory."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.engine.groups.default_group import JoinedRanks
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.observers.performance import MEASURED_STEPS
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.fitting import chosen_recomputation
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import AccelerateChoices, World
from ds_finetune.trainer.forecast import OutOfMemoryError, explain_out_of_memory, forecast_lines
from ds_finetune.trainer.micro_batch import decide_micro_batch
from ds_finetune.trainer.prepare import prepare_run
from ds_finetune.trainer.resolve import ResolvedRun, resolve_here
from tests.json_files import change_json
from tests.running import metrics, start, tiny_task, torchrun

_NO_FILES = {"checkpoint": {"every": "never"}, "export": {"at_end": False}}


def _losses(folder: Path) -> list[float]:
    return [record["train/loss"] for record in metrics(folder)]


def _plan_text(folder: Path) -> str:
    text: str = json.loads((folder / "run" / "plan.json").read_text())["micro batch"]
    return text


def test_auto_trains_like_a_fixed_micro_batch(tmp_path: Path) -> None:
    """Two ranks with four rows have the losses of one rank with single rows. What was predicted is compared with what
    20 steps measured.
    """
    steps = f"{MEASURED_STEPS} steps"
    run_file = tiny_task(tmp_path, train={"micro_batch_size": "auto", "for": steps}, **_NO_FILES)
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"4 \(auto: 0\.00\d GiB at most of .* that are free, by the estimate\)", _plan_text(tmp_path))
    assert re.search(r"memory of a rank +0\.00\d GiB at most of ", done.stdout)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(
        r"memory of the fullest rank 0\.00\d GiB predicted for tensors; its process grew by 0\.\d+ GiB, ", log
    )
    assert "after 20 steps: " not in done.stdout, "on CPUs only the log compares memory"
    last = metrics(tmp_path)[MEASURED_STEPS - 1]
    assert 0 < last["memory/predicted_gib"] < last["memory/measured_gib"] < last["memory/peak_gib"]
    assert "GiB  moments" in log
    auto = _losses(tmp_path)
    fixed = ["train.micro_batch_size=1", f"output_dir={tmp_path / 'fixed' / 'run'}"]
    done = start(["ds-finetune", "train", str(run_file), *fixed])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(auto) == MEASURED_STEPS
    assert auto == pytest.approx(_losses(tmp_path / "fixed"), rel=1e-6)


def test_the_start_after_one_without_memory_takes_half(tmp_path: Path) -> None:
    """The first start takes all eight rows of the global batch; the next ones four, two, one, and then none."""
    world = World(0, 1, 0, 1, "a test")
    run_file = tiny_task(tmp_path, train={"micro_batch_size": "auto"})
    prepared = prepare_run(resolve_here(read_config(run_file), world))
    for rows in (8, 4, 2, 1):
        run = decide_micro_batch(prepared, JoinedRanks(world, torch.distributed.HashStore()))
        assert (run.config.train.micro_batch_size, run.plan.accumulation) == (rows, 8 // rows)
        text = dict(run.plan.decisions)["micro batch"]
        assert text.endswith("by the estimate)" if rows == 8 else f"; {2 * rows} ran out of memory before)")
        with pytest.raises(OutOfMemoryError) as failed, explain_out_of_memory(run):
            torch.empty(2**60, dtype=torch.int8)
        told = f"the same command takes at most {rows // 2} for train.micro_batch_size auto, since {rows} failed; "
        assert failed.value.hint.startswith(told) == (rows > 1)


@pytest.mark.slow
def test_no_memory_on_several_ranks_is_one_error(tmp_path: Path) -> None:
    """Beside it a thread may fail that finds no memory either, since the limit holds for the whole process."""
    run_file = _wide_task(tmp_path, ranks=2)
    worker = str(Path(__file__).with_name("limited_worker.py"))
    done = start(torchrun(worker, "900", str(run_file)))
    assert done.returncode != 0
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1
    assert "ran out of memory: " in done.stderr


def _plan(accelerate: AccelerateChoices | None = None, **deepspeed: object) -> Plan:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "deepspeed": deepspeed}
    train = {"micro_batch_size": "auto", "global_batch_size": 24}
    config = RunConfig.model_validate(tree | {"train": train})
    return make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "torchrun"), device="cpu", accelerate=accelerate)


def test_a_plan_for_an_undecided_micro_batch_has_the_smallest() -> None:
    plan = _plan(train_micro_batch_size_per_gpu="auto")
    assert (plan.micro_batch_size, plan.accumulation) == (1, 12)
    assert dict(plan.decisions)["batch"].startswith("24 rows = micro x accumulation x dp 2, micro as large as fits")


def test_sizes_have_whole_groups_of_forwards_where_ranks_have_several_chunks() -> None:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "parallel": {"pp": 3, "vpp": 2}}
    tree["deepspeed"] = {"zero_optimization": {"stage": 1}}
    config = RunConfig.model_validate(tree | {"train": {"micro_batch_size": "auto", "global_batch_size": 36}})
    plan = make_plan(RunSettings.of(config), world=World(0, 3, 0, 3, "torchrun"), device="cpu")
    assert plan.legal_micro_batches == (1, 2, 3, 4, 6, 12)


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
    chosen = chosen_recomputation(RunMemory(gpu, prepared.model.described, fail), budget=2**30)
    assert chosen == ("full", "its memory is not known: the activations of M cannot be traced: KeyError")
