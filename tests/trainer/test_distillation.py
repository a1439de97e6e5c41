"""Whole runs of distillation: a live teacher, stored scores and their files, resuming, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from ds_finetune import train
from ds_finetune.api import plan_run
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.same_run import changes_since_checkpoint
from ds_finetune.config.schema import read_config
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.teacher_scores import StoredScores
from ds_finetune.errors import FinetuneError
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import PreparedRun, prepare_run
from ds_finetune.trainer.resolve import resolve_here
from ds_finetune.trainer.resume import inputs_of
from ds_finetune.trainer.teach import teach
from tests.running import start, tiny_task, torchrun
from tests.teachers import write_teacher

ALONE = World(0, 1, 0, 1, "a test")
TOP_K = 7


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny task, a teacher of another family for it, and the teacher's scores."""
    folder = tmp_path_factory.mktemp("task")
    run_file = tiny_task(folder, eval={"every": "2 steps"}, export={"at_end": False})
    write_teacher(folder / "teacher", folder / "model")
    teach(RunSettings.of(read_config(run_file)), str(folder / "teacher"), folder / "scores", top_k=TOP_K, say=print)
    return folder


def _run_file(task: Path, name: str, objective: dict[str, Any] | None, **changes: Any) -> Path:
    """A run of the task with another output folder."""
    tree = yaml.safe_load((task / "run.yaml").read_text())
    tree |= {"output_dir": str(task / name)} | ({"objective": {"name": "distill", **objective}} if objective else {})
    for section, values in changes.items():
        tree[section] = values if section == "deepspeed" else tree.get(section, {}) | values
    (task / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return task / f"{name}.yaml"


def _prepared(run_file: Path) -> PreparedRun:
    return prepare_run(resolve_here(read_config(run_file), ALONE))


def test_scores_are_the_logits_of_plain_transformers(task: Path) -> None:
    rows = _prepared(_run_file(task, "look", None)).inputs.train
    assert isinstance(rows, PreparedRows)
    scores = StoredScores.open(task / "scores")
    teacher = AutoModelForCausalLM.from_pretrained(task / "teacher", dtype=torch.float32).eval()
    for number in (0, 5, rows.counts.documents - 1):
        ids, mask = rows.document(number)
        with torch.no_grad():
            logits = teacher(input_ids=torch.tensor([ids])).logits[0, :-1][torch.tensor(mask[1:])]
        log_probs, best = torch.log_softmax(logits.double(), dim=-1).topk(TOP_K)
        found = scores[number]
        assert np.array_equal(found.ids, best.numpy())
        others = np.log1p(-log_probs.exp().sum(-1).numpy())
        assert np.allclose(found.log_probs[:, :-1], log_probs.numpy(), atol=1e-2, rtol=1e-3)
        assert np.allclose(found.log_probs[:, -1], others, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("more", [64, -8])
def test_a_teacher_with_a_padded_vocabulary_is_compared_over_the_common_ids(
    task: Path, tmp_path: Path, more: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The divergence of step 1 is that of plain transformers over the ids that both have."""
    size = int(json.loads((task / "model" / "config.json").read_text())["vocab_size"])
    write_teacher(tmp_path / "padded", task / "model", vocab_size=size + more)
    small = {"train": {"for": "1 steps", "global_batch_size": 32}, "export": {"at_end": True}, "optim": {"lr": 1e-12}}
    run_file = _run_file(task, f"padded{more}", {"teacher": str(tmp_path / "padded")}, **small)
    config = read_config(run_file)
    train(config)
    assert f"compared are {min(size, size + more)} of its {size + more} ids" in capsys.readouterr().out
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (tmp_path / "padded", Path(config.output_dir) / "export")
    )
    rows = _prepared(run_file).inputs.train
    assert isinstance(rows, PreparedRows)
    step = _records(task / f"padded{more}")[0]
    total, tokens, common = 0.0, 0, min(size, size + more)
    for row in range(rows.counts.documents):
        ids, mask = rows.document(row)
        with torch.no_grad():
            wanted, found = (each(input_ids=torch.tensor([ids])).logits[0, :-1].double() for each in (teacher, student))
        kept = torch.tensor(mask[1:])
        log_teacher = torch.log_softmax(wanted[kept][:, :common], dim=-1)
        log_student = torch.log_softmax(found[kept], dim=-1)[:, :common]
        total += float((log_teacher.exp() * (log_teacher - log_student)).sum())
        tokens += int(kept.sum())
    assert step["train/divergence"] == pytest.approx(total / tokens, rel=1e-5)


def test_writing_continues_where_it_was_killed_and_ranks_share_it(task: Path, tmp_path: Path) -> None:
    """The same bytes from two ranks, of which one was killed, and after damage."""
    out, whole = tmp_path / "scores", task / "scores"
    for rank in (1, 0):
        _teach_as(rank, task, out)
    (out / "scores.json").unlink()
    damaged = next(out.glob("shard-*")) / "ids.npy"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"1234")
    with pytest.raises(FinetuneError, match=r"has no scores.json"):
        StoredScores.open(out)
    _teach_as(0, task, out)
    for file in whole.rglob("*.*"):
        assert (out / file.relative_to(whole)).read_bytes() == file.read_bytes()


def _teach_as(rank: int, task: Path, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
            patch.setenv(name, str(value))
        teach(RunSettings.of(read_config(task / "run.yaml")), str(task / "teacher"), out, top_k=TOP_K, say=print)


@pytest.mark.parametrize("source", ["teacher", "scores"])
def test_a_run_of_two_ranks_resumes_with_the_same_numbers(task: Path, source: str) -> None:
    objective = {source: str(task / source), "label_weight": 0.25}
    whole = _run_file(task, f"whole-{source}", objective, checkpoint={"every": "2 steps", "keep": 3})
    done = start(torchrun("ds_finetune/train.py", str(whole)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (f"{task / 'teacher'}, " in done.stdout + done.stderr) == (source == "teacher")
    again = _run_file(
        task,
        f"again-{source}",
        objective,
        checkpoint={"resume": str(task / f"whole-{source}/checkpoints/step-000002")},
    )
    resumed = start(torchrun("ds_finetune/train.py", str(again)))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    first, second = (_records(task / f"{name}-{source}") for name in ("whole", "again"))
    other = _prepared(again)
    state = RunState.read(task / f"whole-{source}" / "checkpoints" / "step-000002")
    assert not changes_since_checkpoint(state, inputs_of(other))
    other = replace(other, inputs=replace(other.inputs, teacher="0" * 16))
    with pytest.raises(FinetuneError, match=rf"weights of the teacher \w+ -> {'0' * 16}"):
        changes_since_checkpoint(state, inputs_of(other))
    assert second[-1]["train/loss"] == pytest.approx(first[-1]["train/loss"], rel=1e-6)
    for record in first:
        parts = 0.75 * record["train/divergence"] + 0.25 * record["train/label_loss"]
        assert record["train/loss"] == pytest.approx(parts, rel=1e-6)
        assert 0 < record["train/divergence"] < math.inf
    evaluated = [record for record in first if "eval/loss" in record][-1]
    # Scores are those of training rows, so that of held-out rows the loss of the labels is left.
    assert ("eval/divergence" in evaluated) == (source == "teacher")
    if source == "scores":
        assert evaluated["eval/loss"] == evaluated["eval/label_loss"]


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_other_rows_and_vocabularies_are_refused_with_both_values(task: Path, tmp_path: Path) -> None:
    scores = {"scores": str(task / "scores")}
    longer = _run_file(task, "longer", scores, data={"train": str(task / "eval.jsonl")})
    with pytest.raises(FinetuneError, match=r"are of another training rows: \w{16} there, \w{16} in this run"):
        _prepared(longer)
    write_teacher(tmp_path / "small", task / "model", vocab_size=20)
    with pytest.raises(FinetuneError, match=r"has a vocabulary of 20 tokens, but its tokenizer has ids up to \d+"):
        _prepared(_run_file(task, "small", {"teacher": str(tmp_path / "small")}))
    write_teacher(tmp_path / "renamed", task / "model")
    file = tmp_path / "renamed" / "tokenizer.json"
    tree = json.loads(file.read_text())
    tokens = tree["model"]["vocab"]
    first, second = sorted(tokens, key=tokens.get)[10:12]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    file.write_text(json.dumps(tree))
    with pytest.raises(
        FinetuneError, match=r"id 1\d is '.*' in the tokenizer of the teacher .*, but '.*' in the model's"
    ):
        _prepared(_run_file(task, "renamed", {"teacher": str(tmp_path / "renamed")}))


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        ({"scores": "x", "temperature": 2.0}, {}, "scores and temperature 2"),
        ({"scores": "x"}, {"data": {"streaming": True}}, "scores and data.streaming true"),
        ({"teacher": "x", "teacher_offload": "cpu"}, {"parallel": {"pp": 2}, "deepspeed": "zero1"}, "pp 2"),
    ],
)
def test_what_is_not_possible_or_not_tested_is_refused(
    task: Path, objective: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    config = read_config(_run_file(task, "refused", objective, **changes))
    with pytest.raises(FinetuneError, match=f"objective distill with .*{text}"):
        make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "a test"), device="cpu")


def test_the_plan_counts_the_teacher(task: Path) -> None:
    teacher = {"teacher": str(task / "teacher")}
    sizes = {}
    for stage, offload in ((2, "none"), (3, "none"), (2, "cpu")):
        zero = {"zero_optimization": {"stage": stage}}
        run_file = _run_file(task, "planned", teacher | {"teacher_offload": offload}, deepspeed=zero)
        planned = plan_run(read_config(run_file), gpus=4)
        (row,) = (row for row in planned.states.rows if row.name == "weights of the teacher")
        sizes[stage, offload] = row.num_bytes, row.place
        held = "whole in GPU memory of each rank" if (stage, offload) == (2, "none") else "over 4 ranks"
        assert held in dict(planned.lines)["teacher"]
    model = AutoModelForCausalLM.from_pretrained(task / "teacher")
    whole = 4 * model.num_parameters()
    assert sizes == {
        (2, "none"): (whole, "gpu"),
        (3, "none"): (-(-whole // 4), "gpu"),
        (2, "cpu"): (-(-whole // 4), "host"),
    }


def test_held_labels_are_those_of_the_rows(task: Path) -> None:
    """As many scores as supervised tokens, document by document."""
    rows, scores = _prepared(_run_file(task, "count", None)).inputs.train, StoredScores.open(task / "scores")
    assert isinstance(rows, PreparedRows)
    for number in range(rows.counts.documents):
        assert len(scores[number].ids) == int((rows[number].labels != IGNORE_INDEX).sum())
