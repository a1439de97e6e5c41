"""The Python API: names that load nothing until they are used, runs in one process, and the same refusals as the
command line's.
"""

import ast
import importlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ds_finetune
from ds_finetune import evaluate, export, plan_run, read_config, train
from ds_finetune.demo import write_demo
from ds_finetune.engine.default_group import process_group
from ds_finetune.errors import ConfigError, LaunchError
from ds_finetune.world import World
from tests.conftest import ROOT
from tests.running import metrics, start, tiny_task


def test_every_name_is_there_and_no_other() -> None:
    assert {"train", "export", "plan_run"} <= set(dir(ds_finetune))
    for name in ds_finetune.__all__:
        assert callable(getattr(ds_finetune, name))
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = ds_finetune.tarin  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["export", "train"])
def test_a_module_does_not_take_the_place_of_the_function_of_its_name(name: str) -> None:
    """`ds_finetune.train` is a file that launchers start: a new process imports it without consequences."""
    code = f"import ds_finetune.{name}; from ds_finetune import {name}; from ds_finetune.export.verify.record import RECORD; assert {name}.__name__ == '{name}'"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert importlib.import_module("ds_finetune.export").__path__


def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    done = start([sys.executable, str(ROOT / "examples" / "python_api.py"), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert "on 2 GPUs: dp 2, ZeRO 1" in done.stdout
    assert "step 10: train/loss" in done.stdout
    assert f"verified: {tmp_path / 'exported'}" in done.stdout
    assert "token_accuracy 0." in done.stdout


TWICE = """
import os, signal, sys, threading
from pathlib import Path
from ds_finetune import read_config, train

class Stopping:
    def __init__(self, out): self.out = out
    def write(self, text):
        if "step 2/" in text:
            raise KeyboardInterrupt
        return self.out.write(text)
    def __getattr__(self, name): return getattr(self.out, name)

def facts():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    ranks = [name for name in os.environ if "RANK" in name or "WORLD" in name or name.startswith("MASTER_")]
    return handlers, ranks, set(threading.enumerate()), os._exit

run_file, folder = sys.argv[1:]
def run(name):
    train(read_config(run_file, [f"output_dir={folder}/{name}/run"]))

before, out = facts(), sys.stdout
run("first")
assert facts() == before, facts()
sys.stdout = Stopping(out)
try:
    run("stopped")
except KeyboardInterrupt:
    sys.stdout = out
    print("stopped as asked")
assert facts() == before, facts()
run("second")
run("stopped")
assert facts() == before, facts()
"""


@pytest.mark.parametrize("stage", [0, 3])
def test_runs_in_one_process_are_the_same_and_leave_nothing_behind(tmp_path: Path, stage: int) -> None:
    """The second follows one that the user stopped, which then resumes: a notebook's day."""
    sections: dict[str, Any] = {
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "checkpoint": {"every": "2 steps"},
    }
    run_file = tiny_task(tmp_path / "task", **sections)
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    done = start([sys.executable, str(program), str(run_file), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stopped as asked" in done.stdout
    first, second, stopped = (
        [record["train/loss"] for record in metrics(tmp_path / name)] for name in ("first", "second", "stopped")
    )
    assert len(first) == 3
    assert first == second == stopped


def test_train_outside_the_main_thread_is_refused(tmp_path: Path) -> None:
    config = read_config(tiny_task(tmp_path))
    refused: list[LaunchError] = []

    def call() -> None:
        try:
            train(config)
        except LaunchError as error:
            refused.append(error)

    thread = threading.Thread(target=call, name="worker-7")
    thread.start()
    thread.join()
    assert "`worker-7`" in refused[0].message
    assert not (tmp_path / "run").exists()


def test_another_accelerator_in_the_same_process_is_refused() -> None:
    from deepspeed.accelerator import get_accelerator

    used = get_accelerator().device_name()
    other = {"cpu": "cuda", "cuda": "cpu"}[used]
    with (
        pytest.raises(ConfigError, match=f"uses {other}, and DeepSpeed has used {used}"),
        process_group(World(0, 1, 0, 1, "test"), other),
    ):
        raise AssertionError


def test_a_plan_is_a_value(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path)
    planned = plan_run(read_config(run_file, ["parallel.tp=2"]), gpus=4)
    whole = plan_run(read_config(run_file), gpus=4)
    assert (planned.plan.dp, planned.plan.mesh.tp, whole.plan.dp) == (2, 2, 4)
    assert planned.state_bytes["weights"] < whole.state_bytes["weights"]
    assert "plan=" not in repr(planned)
    with pytest.raises(ConfigError, match="12 GPUs do not fill nodes of 8"):
        plan_run(read_config(run_file), gpus=12)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "gguf"}, "format is `gguf`"),
        ({"dtype": "int8"}, "dtype is `int8`"),
        ({"with_cache": False}, "--no-cache is not valid with --format safetensors"),
        ({"format": "onnx", "verify": False}, "--no-verify"),
        ({"format": "onnx", "max_shard_size": "1GB"}, "--max-shard-size 1GB"),
    ],
)
def test_options_of_an_export_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        export(tmp_path, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        ("rows.jsonl", {"extract": "regex"}, "extract is `regex`"),
        ("rows.jsonl", {"limit": 0}, "limit is 0"),
        ([], {}, "nothing to score on"),
    ],
)
def test_options_of_an_evaluation_that_cannot_be_are_refused(
    tmp_path: Path, data: str | list[str], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        evaluate(tmp_path, data, **options)


def test_the_documented_example_is_python_and_uses_the_api(tmp_path: Path) -> None:
    """It is the example that is run, with the same calls; its run file and overrides are read here."""
    text = (ROOT / "docs" / "reference" / "python-api.md").read_text().split("```python\n")[1].split("```")[0]
    assert {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} >= {*ds_finetune.__all__} - {
        "RunConfig"
    }
    overrides = ast.literal_eval(text.split("read_config(run_file, ")[1].split(")\n")[0])
    assert read_config(write_demo(tmp_path, ranks=1), overrides).train.duration == "10 steps"
