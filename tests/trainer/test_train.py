"""Whole runs, tiny and real: what they write, that the export is the trained model, and what they refuse."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_finetune.cli.demo import write_demo
from ds_finetune.cli.main import main
from ds_finetune.config.schema import read_config
from ds_finetune.export.safetensors_folder import has_same_weights
from ds_finetune.export.verify.record import ExportRecord
from ds_finetune.observers.trackers import flatten
from ds_finetune.runs.folder import LOG, RunFolder
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import prepare_run
from ds_finetune.trainer.resolve import resolve_here
from ds_finetune.trainer.show import show_plan
from tests.json_files import change_json, read_json
from tests.observers.test_trackers import HAS_MLFLOW, in_mlflow, in_tensorboard, recorded, status_in_mlflow
from tests.running import metrics, start, tiny_task, torchrun

KEYS = {
    "step", "train/loss", "train/grad_norm", "train/skipped_steps", "optim/lr", "data/tokens_seen", "perf/tokens_per_second",
    "perf/supervised_tokens_per_second", "perf/step_seconds", "perf/data_wait_seconds", "memory/peak_gib",
    "router/max_violation_mean", "router/max_violation_max", "router/dead_experts", "router/effective_experts_mean",
    "router/effective_experts_min", "router/entropy",
}  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that evaluated, kept its best weights and exported in several shards."""
    folder = tmp_path_factory.mktemp("run")
    run_file = tiny_task(
        folder,
        deepspeed={"zero_optimization": {"stage": request.param}},
        train={"for": "2 epochs", "precision": "bf16"},
        eval={"every": "4 steps", "keep_best": True, "generate": {"prompts": 3, "max_new_tokens": 4}},
        export={"max_shard_size": "20KB", "verify": True},
        log={"seconds": 0, "trackers": ["tensorboard", *(["mlflow"] if request.param == 2 and HAS_MLFLOW else [])]},
    )
    done = start(torchrun("ds_finetune/train.py", str(run_file)), {"MLFLOW_DISABLE_TELEMETRY": "true"})
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "printed.txt").write_text(done.stdout + done.stderr)
    return folder


OWN_LINES = re.compile(
    r"plan|done in .*|  .*|step \d+/\d+  (epoch [\d.]+  )?(eta .*?  )?loss .*|(rewritten|verified|next): .*|RANDOM WEIGHTS: .*|ds-finetune .*|"
    r"[a-z][a-z/_ -]{0,16} {2,}\S.*|(evaluation|answers|exporting tensors|tokenising rows|verifying exports)[ :].*"
)
"""Tables, the progress line, notes, results, and progress lines of phases."""


def test_every_printed_line_is_the_programs_own(finished: Path) -> None:
    lines = (finished / "printed.txt").read_text().splitlines()
    assert len(lines) > 20
    assert [line for line in lines if line.strip() and not OWN_LINES.fullmatch(line)] == []
    # Beside steps, and phases that took longer than five seconds here.
    fixed = [
        line for line in lines if line and not re.match(r"(evaluation after )?step |\S+ ?\S*(:| \d+/\d+| ) ?\d+ ", line)
    ]
    assert len(fixed) <= 28, fixed


def test_the_run_folder_holds_what_it_should(finished: Path) -> None:
    run = finished / "run"
    assert {
        "config.yaml",
        "plan.json",
        "deepspeed.json",
        "metrics.jsonl",
        "experts.jsonl",
        "samples.jsonl",
        "starts.jsonl",
        "status.json",
        "log.txt",
        "ranks.jsonl",
        "data.json",
        "exports.json",
        "report.html",
        "tensorboard",
        "base",
        "checkpoints",
        "export",
        "export-best",
    } == {p.name for p in run.iterdir() if not p.name.startswith("mlflow.")}
    records = metrics(finished)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(record.keys() >= KEYS for record in records)
    assert [record["step"] for record in records if "eval/loss" in record] == [4, 8]
    assert {"eval/perplexity", "eval/accuracy", "eval/exact_match"} <= records[-1].keys()
    assert list((run / "tensorboard").rglob("events*"))
    assert read_config(run / "config.yaml").train.duration == "2 epochs"


def test_files_of_a_run_have_the_permissions_of_the_umask(finished: Path) -> None:
    """safetensors' own writer makes files that only their owner reads."""
    os.umask(umask := os.umask(0))
    modes = {str(file): file.stat().st_mode & 0o777 for file in (finished / "run").rglob("*") if file.is_file()}
    assert {file for file, mode in modes.items() if mode != 0o666 & ~umask} == set()


def test_trackers_received_the_metrics_and_the_configuration(finished: Path) -> None:
    """In TensorBoard numbers of fp32, in MLflow all digits."""
    run = finished / "run"
    expected = recorded(run)
    scalars, hparams = in_tensorboard(run)
    assert {name: [step for step, _ in points] for name, points in scalars.items()} == {
        name: [step for step, _ in points] for name, points in expected.items()
    }
    assert {name: [value for _, value in points] for name, points in scalars.items()} == {
        name: pytest.approx([value for _, value in points], rel=1e-6) for name, points in expected.items()
    }
    parameters = flatten(yaml.safe_load((run / "config.yaml").read_text()))
    assert hparams == parameters
    assert parameters["train.for"] == "2 epochs"
    if (run / "mlflow.db").exists():
        assert in_mlflow(run) == (expected, {name: str(value) for name, value in parameters.items()})
        assert status_in_mlflow(run) == "FINISHED"
    assert (run / "mlflow.db").exists() == ("mlflow" in parameters["log.trackers"])


def test_a_run_records_its_start_its_data_its_answers_and_its_verified_exports(finished: Path) -> None:
    run = finished / "run"
    (start,) = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
    assert (start["after_step"], start["steps"], start["ranks"]) == (0, 8, 2)
    assert start["versions"]["torch"] == version("torch")
    data = json.loads((run / "data.json").read_text())
    spans = data["samples"][0]["spans"]
    assert {is_supervised for _, is_supervised in spans} == {True, False}
    assert "<|assistant|>" in spans[0][0]
    assert "<h2" in (run / "report.html").read_text()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {4, 8}
    assert [export["folder"] for export in read_json(run / "exports.json")["exports"]] == ["export", "export-best"]


def test_a_run_records_its_end_its_log_and_the_step_times_of_its_ranks(finished: Path) -> None:
    run = RunFolder(finished / "run")
    status = run.status
    assert (status.state, status.step, status.steps, status.ranks) == ("finished", 8, 8, 2)
    lines = [line[21:] for line in run.tail(LOG).splitlines()]
    assert lines[-1] == "finished"
    assert sum(line.startswith("step ") for line in lines) == 8
    times = [json.loads(line) for line in (run.path / "ranks.jsonl").read_text().splitlines()]
    assert [time["step"] for time in times] == [6, 7, 8], "the first step counts in none, and a median needs five"
    assert all(len(time["seconds"]) == 2 and min(time["seconds"]) > 0 for time in times)


def test_weights_of_the_last_and_best_step_are_written_once_and_verified_twice(finished: Path) -> None:
    run, records = finished / "run", metrics(finished)
    assert records[-1]["eval/loss"] < records[3]["eval/loss"], "the last step is not the best"
    assert has_same_weights(run / "export", run / "export-best")
    for name in ("export", "export-best"):
        assert not (run / name / "UNVERIFIED").exists()
        assert ExportRecord.read(run / name).step == records[-1]["step"]


def test_an_export_of_the_checkpoint_is_the_export_of_the_run(finished: Path, tmp_path: Path) -> None:
    """From the fp32 masters on disk, without an engine: the same bytes in the same files, the run's logits too; and
    nothing of a damaged one.
    """
    run = finished / "run"
    assert (
        main(["export", str(run), str(tmp_path / "out"), "--no-verify", "--dtype", "bf16", "--max-shard-size", "20KB"])
        == 0
    )
    assert "not checked yet" in (tmp_path / "out" / "UNVERIFIED").read_text()
    (tmp_path / "out" / "UNVERIFIED").unlink()
    names = sorted(path.name for path in (run / "export").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (run / "export" / name).read_bytes(), name
    damaged = tmp_path / "step-000008"
    shutil.copytree(run / "checkpoints" / "step-000008", damaged)
    part = next(damaged.glob("part-00001*"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert main(["export", str(damaged), str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_the_export_loads_in_plain_transformers(finished: Path) -> None:
    export = finished / "run" / "export"
    index = json.loads((export / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    tensors = {key: tensor for file in files for key, tensor in load_file(export / file).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in tensors
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    config = json.loads((export / "config.json").read_text())
    assert (config["topk_method"], config["torch_dtype"], config["architectures"]) == (
        "noaux_tc",
        "bfloat16",
        ["DeepseekV3ForCausalLM"],
    )
    model, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (export / name).read_bytes() == (finished / "model" / name).read_bytes()
    loss = _held_out_loss(model, finished)
    assert loss == pytest.approx(metrics(finished)[-1]["eval/loss"], abs=2e-3)


def _held_out_loss(model: Any, folder: Path) -> float:
    """Mean loss of the answers of the held-out rows, one at a time, with transformers' own template and loss."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total = count = 0.0
    for line in (folder / "eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        prompt, whole = (
            tokenizer(
                tokenizer.apply_chat_template(t, add_generation_prompt=opens, tokenize=False), add_special_tokens=False
            )["input_ids"]
            for t, opens in ((turns[:1], True), (turns, False))
        )
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(whole[len(prompt) :]), reduction="sum").item()
        count += len(whole) - len(prompt)
    return total / count


def test_asking_the_export(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(finished / "run" / "export"), "1969-07-20", "--max-new-tokens", "3"]) == 0
    assert "> 1969-07-20" in capsys.readouterr().out
    assert main(["ask", str(finished), "x"]) == 2


def test_one_row_more_than_the_batches_hold_does_not_hang(tmp_path: Path) -> None:
    """4N+1 rows on two ranks: every row once, and the last batch is filled with rows of nothing."""
    run_file = tiny_task(tmp_path, train={"for": "1 epochs"}, eval=None)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:17]))
    (tmp_path / "eval.jsonl").write_text("".join(lines[:5]))
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    records = metrics(tmp_path)
    assert len(records) == math.ceil(17 / 8)
    assert records[-1]["data/tokens_seen"] > records[-2]["data/tokens_seen"]
    assert records[-1]["data/supervised_tokens"] < records[-2]["data/supervised_tokens"] / 4


def test_streaming_trains_on_two_ranks(tmp_path: Path) -> None:
    run_file = tiny_task(
        tmp_path, data={"streaming": True, "packing": True}, deepspeed={"zero_optimization": {"stage": 3}}
    )
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "streamed from 1 sources" in done.stdout
    losses = [record["train/loss"] for record in metrics(tmp_path)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert not list((tmp_path / "cache").glob("*/train*"))


@pytest.mark.usefixtures("environ")
def test_evaluations_and_checkpoints_of_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """32 rows in steps of 12: an epoch ends within steps 3, 6 and 8, half of one within 2, 3, 4, 6, 7 and 8."""
    run_file = tiny_task(
        tmp_path,
        train={"for": "3 epochs", "global_batch_size": 12},
        eval={"every": "1 epoch"},
        checkpoint={"every": "0.5 epochs", "keep": 9, "keep_best": False},
        export={"at_end": False},
    )
    assert main(["train", str(run_file)]) == 0
    printed = capsys.readouterr().out
    assert "1 epochs: 2.66667 steps, each rounded up" in printed
    assert "0.5 epochs: 1.33333 steps, each rounded up" in printed
    assert [record["step"] for record in metrics(tmp_path) if "eval/loss" in record] == [3, 6, 8]
    saved = {int(path.name.rpartition("-")[2]) for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert saved == {2, 3, 4, 6, 7, 8}


@pytest.mark.usefixtures("environ")
def test_a_share_of_the_rows_is_held_out_also_on_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tiny_task(tmp_path, data={"eval": "25%", "rows": 24}, export={"at_end": False})
    assert main(["train", str(run_file), "train.for=2 steps"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "data.eval: 6 rows of data.train, drawn by train.seed 0, are not trained" in printed
    assert "data.rows: only the first 24 rows of data.train are read" in printed
    resumed = ["train", str(run_file), "train.for=3 steps"]
    assert main([*resumed, "data.eval=50%"]) == 2
    assert "training rows" in capsys.readouterr().err
    assert main(resumed) == 0
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3]
    assert "eval/loss" in metrics(tmp_path)[-1]


def test_early_stopping(tmp_path: Path) -> None:
    run_file = tiny_task(
        tmp_path,
        train={"for": "50 steps"},
        optim={"lr": 5.0, "warmup": "0"},
        eval={"every": "1 steps", "patience": 2},
        export={"at_end": False},
    )
    done = start(torchrun("ds_finetune/train.py", str(run_file), ranks=1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(tmp_path)) < 50
    assert "STOP: eval/loss has not fallen below" in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: ds-finetune export {tmp_path / 'run'} OUT"
    assert not (tmp_path / "run" / "export").exists()


def test_a_run_that_resumes_in_another_folder_counts_on_and_needs_the_old_one_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights do not change at such a rate, so the first evaluation stays the best one."""
    run_file = tiny_task(
        tmp_path, train={"for": "3 steps"}, optim={"lr": 1e-30, "warmup": "0"}, eval={"every": "1 steps"}
    )
    old, new = tmp_path / "run", tmp_path / "new"
    assert main(["train", str(run_file), "eval.keep_best=true"]) == 0
    resumed = ["train", str(run_file), f"checkpoint.resume={old}", f"output_dir={new}", "train.for=8 steps"]
    resumed += ["eval.keep_best=true", "eval.patience=3"]
    capsys.readouterr()
    assert main(resumed) == 0
    printed = capsys.readouterr().out
    assert "of step 1 for 3 evaluations" in printed
    assert printed.count(f"is of step 1, and its weights are {old / 'export-best'}") == 2
    (record,) = (json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines())
    assert record["step"] == 4
    # Cosine with W = 1 and N = 8, as docs/explanation/numerical-rules.md has it.
    share = 0.05 + 0.95 * (1 + math.cos(math.pi * 3 / 7)) / 2
    assert record["optim/lr"] == pytest.approx(1e-30 * share, rel=1e-9)
    shutil.rmtree(old)
    assert main(resumed) == 0
    printed = capsys.readouterr().out
    assert f"an earlier start with checkpoint.resume {old} saved checkpoints in {new / 'checkpoints'}" in printed
    assert f"resuming from {new / 'checkpoints' / 'step-000004'}" in printed
    assert "the run is finished" in printed


@pytest.fixture
def environ() -> Iterator[None]:
    """Leaves the environment as it was: a run sets the launchers' variables."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    yield
    os.environ.clear()
    os.environ.update(before)


def _lines(path: Path, *lines: str) -> None:
    path.write_text("".join(line + "\n" for line in lines))


def _poison(folder: Path) -> None:
    from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
    from ds_finetune.model.weights.load import initialise_weights

    model = build_skeleton(read_hf_config(str(folder / "model")), attention="sdpa", dtype=torch.float32, device="cpu")
    initialise_weights(model, seed=0)
    model.save_pretrained(folder / "weights")
    shutil.copy(folder / "weights" / "model.safetensors", folder / "model")
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "missing file": (lambda f: (f / "train.jsonl").unlink(), {}, "train.jsonl` does not exist"),
    "empty file": (lambda f: (f / "train.jsonl").write_text(""), {}, "train.jsonl` is empty"),
    "broken line": (
        lambda f: _lines(f / "train.jsonl", '{"prompt": "a", "completion": "b"}', '{"prompt": "a",'),
        {},
        "train.jsonl line 2 column 16 is not JSON",
    ),
    "wrong column": (
        lambda f: _lines(f / "train.jsonl", '{"ask": "a", "say": "b"}'),
        {},
        "train.jsonl line 1 has columns ask, say, which fit no layout",
    ),
    "wrong name of a column": (
        lambda f: _lines(f / "train.jsonl", '{"ask": "a", "say": "b"}'),
        {"data": {"columns": {"prompt": "asks", "completion": "say"}}},
        "which fit no layout, and data.columns names others: prompt: asks",
    ),
    "unknown role": (
        lambda f: _lines(f / "train.jsonl", '{"messages": [{"role": "robot", "content": "x"}]}'),
        {},
        "train.jsonl line 1: unknown role 'robot'",
    ),
    "too long for the model": (
        None,
        {"train": {"max_seq_len": 4096}},
        "train.max_seq_len 4096 is more than the 512 positions",
    ),
    "answers too long for the model": (
        None,
        {"eval": {"generate": {"prompts": 2, "max_new_tokens": 512}}},
        "and max_new_tokens 512 add up to more than the 512 positions",
    ),
    "context that the positions do not allow": (
        lambda f: _change_model(f, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        {"model": {"context": 1024}},
        "model.context 1024 is more than the 512 positions of the model, whose rotary scaling (linear)",
    ),
    "offload without a device": (
        None,
        {"train": {"activation_checkpointing": "full", "activation_offload": True}},
        "with device cpu",
    ),
    "vocabulary": (
        lambda f: _change_model(f, vocab_size=50),
        {},
        "the tokenizer has ids up to 100 and the model a vocabulary of 50",
    ),
    "no weights": (None, {"model": {"weights": "load"}}, "has no safetensors weights"),
    "NaN in the weights": (_poison, {"model": {"weights": "load"}}, "tensor `lm_head.weight` of"),
    "zero learning rate": (None, {"optim": {"lr": 0}}, "`optim.lr` is 0: it should be greater than 0"),
    "batch that does not divide": (
        None,
        {"train": {"global_batch_size": 7}},
        "train.global_batch_size 7 is not a multiple of micro_batch_size 2 x dp 1 = 2",
    ),
    "streaming for epochs": (
        None,
        {"data": {"streaming": True}, "train": {"for": "2 epochs"}},
        "`2 epochs`, and with data.streaming the number of tokens and epochs is not known",
    ),
    "evaluation of streams in epochs": (
        None,
        {"data": {"streaming": True}, "eval": {"every": "1 epoch"}},
        "`1 epochs`, and with data.streaming the number of tokens and epochs is not known",
    ),
    "checkpoints of streams in epochs": (
        None,
        {"data": {"streaming": True}, "checkpoint": {"every": "0.5 epochs or 1 hour"}},
        "`0.5 epochs or 1 hour`, and with data.streaming the number of tokens and epochs is not known",
    ),
    "patience of epochs": (
        None,
        {"train": {"for": "2 epochs"}, "eval": {"every": "1 epoch", "patience": 1}},
        "with eval.every `1 epochs` it has 2 evaluations",
    ),
    "no template file": (None, {"data": {"template": "none.jinja"}}, "data.template `none.jinja` does not exist"),
    "unknown tracker": (None, {"log": {"trackers": ["wandbb"]}}, "log.trackers names `wandbb`"),
    "output below a file": (None, {"output_dir": "{folder}/run.yaml/run"}, "/run.yaml`: Not a directory"),
    "no supervised tokens": (
        lambda f: _lines(f / "train.jsonl", '{"messages": [{"role": "user", "content": "x"}]}'),
        {},
        "none of the 1 rows of",
    ),
}


def _change_model(folder: Path, **values: Any) -> None:
    path = folder / "model" / "config.json"
    change_json(path, values)


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_before_step_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, sections, message = BAD[name]
    given = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in sections.items()}
    run_file = tiny_task(tmp_path, **given)
    if spoil:
        spoil(tmp_path)
    assert main(["train", str(run_file)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "hint: " in printed
    assert printed.count("error: ") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("environ")
def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tiny_task(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert main(["train", str(run_file)]) == 2
    assert "is not empty and holds no run: metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "run" / "plan.json").write_text('{"layout": "", "notes": []}')
    assert main(["train", str(run_file)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.usefixtures("environ")
def test_data_show_marks_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tiny_task(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row | {"source": "x"}) + "\n" for row in rows))
    assert main(["data", "show", str(run_file), "--samples", "1"]) == 0
    printed = capsys.readouterr().out
    row = rows[0]
    assert f"<|bos|><|user|>{row['prompt']}<|assistant|>⟦{row['completion']}<|eos|>⟧" in printed
    assert "rows read" in printed
    assert re.search(r"prompts +0 of [\d,]+ rows \(0.0%\) have", printed)
    assert f"columns and fields that are not used: source ({len(rows):,} rows)" in printed
    show_plan(prepare_run(resolve_here(read_config(run_file), World.from_environment({}))))
    printed = capsys.readouterr().out
    assert "have a prompt that differs" not in printed
    assert f"data.train: columns and fields that are not used: source ({len(rows):,} rows)" in printed


def test_config_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = write_demo(tmp_path)
    assert main(["config", "show", str(run_file), "train.seed=7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["seed"] == 7
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["train"]["description"]
