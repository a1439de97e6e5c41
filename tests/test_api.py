"""The Python API: names that load nothing until they are used, runs in one process, and the same refusals as the
command line's.
"""

import ast
import json
import math
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import AutoTokenizer

import ds_finetune
from ds_finetune import evaluate, export_model, plan_run, read_config, train
from ds_finetune.checkpoint.locking import LOCK
from ds_finetune.cli.demo import write_demo
from ds_finetune.config.schema import RunConfig, dump_config
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.errors import ConfigError, DataError, FinetuneError, LaunchError
from ds_finetune.system.world import World
from ds_finetune.trainer.run_dir import begun_with_rows, write_rows
from tests.conftest import ROOT
from tests.running import metrics, start, tiny_task, torchrun

TREE = {"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "o"}


def test_every_name_is_there_and_no_other() -> None:
    assert {"train", "export_model", "plan_run"} <= set(dir(ds_finetune))
    for name in ds_finetune.__all__:
        assert callable(getattr(ds_finetune, name))
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = ds_finetune.tarin  # type: ignore[attr-defined]


def test_train_is_the_function_in_every_order_of_imports() -> None:
    """`ds_finetune/train.py` is the file that launchers start; a module of its name would replace the function."""
    code = """
import runpy, ds_finetune.export.verify.record
try:
    import ds_finetune.train
except AssertionError:
    from ds_finetune import export_model, train
    assert (train.__module__, export_model.__module__) == ("ds_finetune.api", "ds_finetune.api")
    runpy.run_path("ds_finetune/train.py", run_name="__mp_main__")
    print(ds_finetune.train is train)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


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
        pytest.raises(ConfigError, match=f"uses {other}, but DeepSpeed has already used {used}"),
        process_group(World(0, 1, 0, 1, "test"), other),
    ):
        raise AssertionError


def _task_without_files(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The run file of the tiny task as a dictionary that names no data, and the rows of its files."""
    tree = yaml.safe_load(tiny_task(folder, eval={"every": "3 steps"}).read_text())
    files = {name: Path(tree["data"].pop(name)) for name in ("train", "eval")}
    rows = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    return tree | {"output_dir": folder / "run"}, rows


def _with_rows(config: RunConfig, rows: dict[str, Any]) -> RunConfig:
    files = write_rows(Path(config.output_dir), rows)
    return config.model_copy(update={"data": config.data.model_copy(update=files)})


def test_rows_in_memory_are_prepared_as_those_of_their_file(tmp_path: Path) -> None:
    tree, rows = _task_without_files(tmp_path)
    plain = read_config(tree, [f"data.{name}={tmp_path}/{name}.jsonl" for name in rows])
    configs = [_with_rows(plain, {"train": given}) for given in (rows["train"], Dataset.from_list(rows["train"]))]
    assert configs[0] == configs[1] == read_config(yaml.safe_load(dump_config(configs[0])))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prepared = [
        prepare_rows(config.data, "train", tokenizer=tokenizer, limits=TokenLimits(64, 128))
        for config in (plain, configs[0])
    ]
    assert prepared[0].content == prepared[1].content
    (file,) = (tmp_path / "run" / "rows").iterdir()
    before = file.stat()
    assert configs[0].data.train == (str(file),)
    assert _with_rows(plain, {"train": iter(rows["train"])}) == configs[0]
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, 0)
    assert _with_rows(plain, {"train": rows["train"][:-1]}) != configs[0]


def test_a_run_that_began_keeps_its_rows(tmp_path: Path) -> None:
    """Also where it is refused when it is started again."""
    tree, rows = _task_without_files(tmp_path)
    config = read_config(tree, [f"data.{name}=rows" for name in rows])
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / LOCK).touch()
    with pytest.raises(ConfigError), begun_with_rows(Path(config.output_dir), {"train": rows["train"]}, is_first=True):
        raise ConfigError("refused", hint="none")
    (file,) = (tmp_path / "run" / "rows").iterdir()
    assert file.name.startswith("train-")


def test_ranks_train_on_the_same_rows_in_memory(tmp_path: Path) -> None:
    tree, rows = _task_without_files(tmp_path)
    tree |= {"output_dir": str(tmp_path / "run"), "checkpoint": {"every": "3 steps"}}
    program = tmp_path / "ranks.py"
    call = f"train({tree!r}, rows={rows['train']!r}, eval_rows={rows['eval']!r})"
    program.write_text(f"from ds_finetune import train\n{call}\n")
    done = start(torchrun(str(program)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3]
    assert "eval/loss" in metrics(tmp_path)[-1]
    prepared = {folder.name for folder in (tmp_path / "cache").iterdir()} - {"traces"}
    assert len(list((tmp_path / "run" / "rows").iterdir())) == len(prepared) == 2
    again = read_config(tmp_path / "run" / "config.yaml", ["train.for=4 steps"])
    assert _with_rows(again, {"train": rows["train"], "eval": rows["eval"]}) == again


def test_a_finished_run_that_is_started_again_has_its_last_record(tmp_path: Path) -> None:
    tree, rows = _task_without_files(tmp_path)
    tree |= {"output_dir": str(tmp_path / "run"), "export": {"formats": ["safetensors"]}}
    program = tmp_path / "twice.py"
    program.write_text(
        f"from ds_finetune import train\nreport = train({tree!r}, rows={rows['train']!r}, eval_rows={rows['eval']!r})\n"
        "print('REPORT', report.last.step, report.last.values['train/loss'], [path.name for path in report.exports])\n"
    )
    first = start([sys.executable, str(program)])
    (tmp_path / "run" / "export" / "notes.md").write_text("mine\n")
    written = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "export").iterdir() if path.name != "README.md"
    }
    (tmp_path / "run" / "export" / "UNVERIFIED").write_text("not checked: the memory was full\n")
    (tmp_path / "run" / "exports.json").unlink()
    done = start([sys.executable, str(program)])
    assert first.returncode == done.returncode == 0, first.stderr[-3000:] + done.stderr[-3000:]
    reports = [each.stdout.partition("REPORT")[2] for each in (first, done)]
    loss = metrics(tmp_path)[-1]["train/loss"]
    assert [report.split()[1] for report in reports] == [str(loss)] * 2
    assert reports[0] == reports[1]
    assert "the run is finished" in done.stdout
    assert "world_size" not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in written} == written
    (verdict,) = json.loads((tmp_path / "run" / "exports.json").read_text())["exports"]
    assert (verdict["folder"], verdict["is_verified"]) == ("export", True)


def test_a_run_whose_export_is_missing_has_its_last_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, rows = _task_without_files(tmp_path)
    tree |= {"output_dir": str(tmp_path / "run"), "export": {"verify": False}}
    train(tree, rows=rows["train"], eval_rows=rows["eval"])
    shutil.rmtree(tmp_path / "run" / "export")
    capsys.readouterr()
    report = train(tree, rows=rows["train"], eval_rows=rows["eval"])
    (*_, last) = metrics(tmp_path)
    assert report.last is not None
    assert (report.last.step, report.last.values["train/loss"]) == (last["step"], last["train/loss"])
    assert [path.name for path in report.exports] == ["export"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("train.jsonl", "the rows of data.train are a `str`"),
        ({"train": []}, "the rows of data.train are a `dict`"),
        (5, "the rows of data.train are a `int`"),
        ([], "data.train has 0 rows"),
        (["a"], "row 1 of data.train is a `str`, not a dictionary"),
        ([{"text": "a"}, {"text": b"a"}], "row 2 of data.train is not JSON: Object of type bytes"),
        ([{"text": math.nan}], "row 1 of data.train is not JSON: Out of range float"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, rows: Any, told: str) -> None:
    with pytest.raises(DataError) as caught:
        train(TREE | {"output_dir": tmp_path / "run"}, rows=rows)
    assert told in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_made", [False, True])
def test_a_refused_run_keeps_no_rows(tmp_path: Path, *, is_made: bool) -> None:
    """Neither where its rows have no layout nor where its model is not there, which the run looks at later."""
    folder = tmp_path / "run"
    for changes, rows in (({}, [{"neither": "x"}]), ({"model": str(tmp_path / "none")}, [{"text": "a"}])):
        if is_made:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        with pytest.raises(FinetuneError):
            train(TREE | {"output_dir": str(folder)} | changes, rows=rows)
        assert [path.name for path in tmp_path.glob("run/*")] == ["logs"] * is_made
        assert folder.exists() == is_made


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None,), "the run's configuration is None"),
        (("none.yaml",), "run file `none.yaml` does not exist"),
        (({"model": "m"},), "`output_dir` is missing"),
        (({**TREE, "optim": {"lrr": 1}},), "the configuration: unknown key `optim.lrr`"),
        ((TREE, "optim.lr=1"), "`overrides` is 'optim.lr=1'"),
        ((TREE, [1]), "`overrides` is [1"),
        ((TREE, {"optim.lr": 1}), "`overrides` is {'optim.lr': 1}"),
        ((TREE, None), "`overrides` is None"),
        ((TREE, ["optim.lr=x"]), "`optim.lr` is 'x'"),
        ((read_config(TREE), ["optim.lr=x"]), "`optim.lr` is 'x'"),
    ],
)
@pytest.mark.parametrize(
    "function", [train, partial(train, rows=[]), read_config, lambda *given: plan_run(read_config(*given), gpus=1)]
)
def test_configurations_that_are_none(function: Any, given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function(*given)
    assert told in caught.value.message
    assert caught.value.hint


def test_a_configuration_has_several_forms(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path)
    tree = yaml.safe_load(run_file.read_text())
    config = read_config(str(run_file), ["optim.lr=1e-4"])
    assert config == read_config(tree, ["optim.lr=1e-4"]) == read_config(read_config(tree), ["optim.lr=1e-4"])
    assert read_config(config) is config
    assert tree == yaml.safe_load(run_file.read_text())
    assert plan_run(tree, gpus=2).plan.dp == plan_run(run_file, gpus=2).plan.dp == 2
    for gpus in ("2", 2.0, True, None, 0):
        with pytest.raises(ConfigError, match="gpus is"):
            plan_run(tree, gpus=gpus)  # type: ignore[arg-type]


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
        ({"format": "tar"}, "format `tar` is not known"),
        ({"source": None}, "source is None"),
        ({"out": 5}, "out is 5"),
        ({"dtype": "int3"}, "unknown --dtype `int3`"),
        ({"with_cache": False}, "--no-cache is not valid with --format safetensors"),
        ({"format": "onnx", "verify": False}, "--no-verify"),
        ({"format": "onnx", "max_shard_size": "1GB"}, "--max-shard-size 1GB"),
    ],
)
def test_options_of_an_export_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        export_model(**{"source": tmp_path, "out": tmp_path / "out"} | options)


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        ("rows.jsonl", {"extract": "regex"}, "extract is `regex`"),
        ("rows.jsonl", {"limit": 0}, "limit is 0"),
        ("rows.jsonl", {"limit": "3"}, "limit is '3'"),
        ("rows.jsonl", {"max_seq_len": 2.5}, "max_seq_len is 2.5"),
        ("rows.jsonl", {"train_on": "user"}, "evaluate: `train_on` is 'user'"),
        ("rows.jsonl", {"columns": "a=b"}, "evaluate: `columns` is 'a=b'"),
        (5, {}, "data is 5"),
        ([], {}, "nothing to score on"),
        ("5%", {}, "data is '5%', a share of training rows"),
    ],
)
def test_options_of_an_evaluation_that_cannot_be_are_refused(
    tmp_path: Path, data: Any, options: dict[str, Any], told: str
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
