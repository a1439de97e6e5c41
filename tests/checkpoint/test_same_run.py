"""What a resumed run must have in common with its checkpoint, key by key, and what else is compared."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_origin

import pytest
import torch.distributed as dist
from pydantic import BaseModel

from ds_finetune.checkpoint.commit import CommitJob, Manifest, commit, partial_name, step_name
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.same_run import (
    RunIdentity,
    changes_since_checkpoint,
    model_mismatch,
    on_resume,
)
from ds_finetune.config.objectives import OBJECTIVES, ObjectiveConfig
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.config.sections import TrainConfig
from ds_finetune.config.value_types import OnResume
from ds_finetune.errors import CheckpointError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.precision import Bf16Support, with_precision
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.resume import ResumePoint, find_resume_point, inputs_of
from tests.json_files import change_json
from tests.model.tiny import CONFIGS
from tests.planning import prepared_run
from tests.running import tiny_task

TREE: dict[str, Any] = {"model": "m", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "output_dir": "x"}


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted name of every key of the run file."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        # A list of sections is one value.
        parts = () if get_origin(field.annotation) is tuple else getattr(field.annotation, "__args__", ())
        kinds = (field.annotation, *parts)
        is_objective = field.annotation is ObjectiveConfig
        sections = (
            [row.section for row in OBJECTIVES.values()]
            if is_objective
            else [kind for kind in kinds if _is_section(kind)]
        )
        yield from [] if sections else [key]
        for inner in sections:
            yield from keys_of(inner, f"{key}.")


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


KEYS = sorted(set(keys_of(RunConfig)))


def test_a_key_of_several_objectives_has_the_same_mark_in_each() -> None:
    marks: dict[str, set[object]] = {}
    for row in OBJECTIVES.values():
        for name, field in row.section.model_fields.items():
            marks.setdefault(name, set()).add(tuple(mark for mark in field.metadata if isinstance(mark, OnResume)))
    assert all(len(found) == 1 for found in marks.values()), marks


@pytest.mark.parametrize(
    ("key", "action"),
    [
        ("optim.lr", OnResume.PRINTED),
        ("train.for", OnResume.PRINTED),
        ("train.seed", OnResume.REFUSED),
        ("data.train.a.jsonl", OnResume.ROWS),
        ("data.columns.prompt", OnResume.ROWS),
        ("lora.rank", OnResume.REFUSED),
        ("checkpoint.every", OnResume.FREE),
        ("objective.beta", OnResume.REFUSED),
        ("objective.teacher_offload", OnResume.FREE),
        ("deepspeed.zero_optimization.stage", OnResume.FREE),
        ("features.toy.weight", OnResume.REFUSED),
        ("a.key.of.an.older.version", OnResume.PRINTED),
    ],
)
def test_the_action_on_a_key_is_its_mark_or_that_of_its_section(key: str, action: OnResume) -> None:
    assert on_resume(key) is action


def dumped(tree: dict[str, Any]) -> dict[str, Any]:
    return RunConfig.model_validate(tree).model_dump(mode="json", by_alias=True)


def changed(key: str, config: dict[str, Any]) -> dict[str, Any]:
    """A run file with another value of one key."""
    tree = json.loads(json.dumps(config))
    branch = tree
    for part in key.split(".")[:-1]:
        branch = branch[part]
    branch[key.rpartition(".")[2]] = "another value"
    return tree


def state_of(config: dict[str, Any], **values: Any) -> RunState:
    given: dict[str, Any] = {
        "step": 5,
        "skipped_steps": 0,
        "tokens_seen": 100,
        "position": (0, 3),
        "engine": {},
        "observers": {},
        "values": {},
    }
    given |= {"data": "rows", "config": config, "layout": {}, "versions": {}}
    return RunState(**given | values)


def test_names_and_weights_of_files_are_compared_key_by_key() -> None:
    """Other weights are other training rows; another list of held-out sets is printed."""
    data = {"train": {"a.jsonl": 0.9, "b.jsonl": 0.1}, "eval": {"old": "c.jsonl"}}
    state = state_of(dumped(TREE | {"data": data}))
    assert changes_since_checkpoint(state, RunIdentity(state.config, "rows")) == []
    config = dumped(TREE | {"data": {"train": {"a.jsonl": 0.8, "b.jsonl": 0.1}, "eval": {"old": "d.jsonl"}}})
    assert changes_since_checkpoint(state, RunIdentity(config, "rows")) == [
        "changed since the checkpoint: data.eval.old ['c.jsonl'] -> ['d.jsonl']",
        "changed since the checkpoint: data.train.a.jsonl 0.9 -> 0.8",
    ]
    with pytest.raises(CheckpointError, match="training rows rows -> others"):
        changes_since_checkpoint(state, RunIdentity(config, "others"))


OPTIONAL: dict[str, Any] = {"lora": {}, "router": {}, "profile": {"steps": 1}}
"""Sections that a run file may leave out."""


@pytest.mark.parametrize("key", KEYS)
def test_a_changed_key_is_refused_printed_or_without_effect(key: str) -> None:
    section = key.partition(".")[0]
    before = dumped(TREE | {name: given for name, given in OPTIONAL.items() if name == section})
    state, config = state_of(before), changed(key, before)
    if on_resume(key) is OnResume.REFUSED:
        with pytest.raises(CheckpointError, match=f"{key} .* -> "):
            changes_since_checkpoint(state, RunIdentity(config, "rows"))
        return
    lines = changes_since_checkpoint(state, RunIdentity(config, "rows"))
    assert (on_resume(key) in (OnResume.PRINTED, OnResume.ROWS)) == any(
        line.startswith(f"changed since the checkpoint: {key}") for line in lines
    ), lines
    if on_resume(key) is OnResume.ROWS:
        with pytest.raises(CheckpointError, match="training rows rows -> others"):
            changes_since_checkpoint(state, RunIdentity(config, "others"))


def test_nothing_is_refused_or_printed_where_nothing_changed() -> None:
    routers = dumped(TREE | {"router": {"train": True}})
    assert changes_since_checkpoint(state_of(dumped(TREE)), RunIdentity(routers, "rows")) == []
    old = dumped(TREE)
    del old["watchdog"], old["train"]["seed"], old["model"]["resize_vocabulary"]
    assert changes_since_checkpoint(state_of(old), RunIdentity(dumped(TREE), "rows")) == []
    assert (
        changes_since_checkpoint(
            state_of(dumped(TREE)), RunIdentity(dumped(TREE | {"optim": {"name": "adam"}}), "rows")
        )
        == []
    )


@pytest.mark.parametrize("asked", ["auto", "fp32"])
def test_another_precision_is_printed_with_both(asked: str) -> None:
    """Also where the run file has `auto`, which is another precision on the CPU that resumes than on the first one."""
    then = dumped(TREE | {"train": {"precision": "bf16"}})
    section = TrainConfig.model_validate({"precision": asked})
    train, _ = with_precision(section, device="cpu", support=Bf16Support("an old CPU", is_native=False))
    now = dumped(TREE) | {"train": train.model_dump(mode="json", by_alias=True)}
    lines = changes_since_checkpoint(state_of(then), RunIdentity(now, "rows"))
    assert lines == ["changed since the checkpoint: train.precision 'bf16' -> 'fp32'"]


def test_a_deepspeed_file_whose_contents_changed_is_printed() -> None:
    """The run file names the same file as before."""
    config = dumped(TREE | {"deepspeed": "zero2.json"})
    then = {
        "zero_optimization": {"stage": 2},
        "train_batch_size": 8,
        "optimizer": {"params": {"eps": 1}},
        "communication_data_type": "fp32",
    }
    now = then | {"communication_data_type": "bf16", "train_batch_size": 16}
    lines = changes_since_checkpoint(state_of(config, deepspeed=then), RunIdentity(config, "rows", deepspeed=now))
    assert lines == ["changed since the checkpoint: DeepSpeed's communication_data_type 'fp32' -> 'bf16'"]


def test_another_version_is_printed() -> None:
    lines = changes_since_checkpoint(
        state_of(dumped(TREE), versions={"torch": "1.0"}), RunIdentity(dumped(TREE), "rows")
    )
    assert [line.partition("->")[0] for line in lines] == ["changed since the checkpoint: torch 1.0 "]


@pytest.mark.parametrize(
    ("best", "sections", "is_refused"),
    [
        (1.5, {}, True),
        (math.inf, {}, False),
        (1.5, {"eval": {"keep_best": False}, "checkpoint": {"keep_best": False}}, False),
        (1.5, {"eval": {"keep_best": False, "patience": 2}, "checkpoint": {"keep_best": False}}, True),
    ],
)
def test_losses_on_other_evaluation_rows_are_not_compared(
    best: float, sections: dict[str, Any], is_refused: bool
) -> None:
    config = dumped(TREE | sections)
    state = state_of(config, observers={"best": {"best_loss": best}}, held_out="8 rows, abc")
    if is_refused:
        with pytest.raises(
            CheckpointError,
            match=r"best eval/loss 1\.5000 .* was measured on other rows: evaluation rows 8 rows, abc -> 9 rows, def",
        ):
            changes_since_checkpoint(state, RunIdentity(config, "rows", held_out="9 rows, def"))
    else:
        assert changes_since_checkpoint(state, RunIdentity(config, "rows", held_out="9 rows, def")) == [
            "changed since the checkpoint: evaluation rows 8 rows, abc -> 9 rows, def"
        ]
    assert changes_since_checkpoint(state, RunIdentity(config, "rows", held_out="8 rows, abc")) == []


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tree: tree.update(rms_norm_eps=1e-3), "rms_norm_eps 1e-06 -> 0.001"),
        (lambda tree: tree.update(rope_theta=5e5), "rope_parameters.rope_theta 10000.0 -> 500000.0"),
        (lambda tree: tree.update(num_experts_per_tok=3), "num_experts_per_tok 2 -> 3"),
        (lambda tree: tree.update(attention_dropout=0.1), "attention_dropout 0.0 -> 0.1"),
        (lambda tree: tree.update(pad_token_id=3), "pad_token_id None -> 3"),
        (
            lambda tree: tree.update(routed_scaling_factor=1.0, n_group=1),
            "n_group 2 -> 1; routed_scaling_factor 2.5 -> 1.0",
        ),
        (lambda tree: tree.update(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}), ""),
        (
            lambda tree: tree.update(
                torch_dtype="float32",
                transformers_version="4.1",
                use_cache=False,
                auto_map={"a": "b"},
                _name_or_path="x",
            ),
            "",
        ),
        (lambda tree: tree.update(rms_norm_eps=1e-6, attention_dropout=0.0), ""),
    ],
)
def test_a_config_json_that_changes_numbers_is_another_model(
    edit: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    kept = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    edit(now := dict(kept))
    found = model_mismatch(tmp_path, "config.json", now)
    assert (found.message if found else "").partition(f"{tmp_path}: ")[2] == said


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[PreparedRun]:
    """A run that has a checkpoint of step 3, whose state and config.json are those of a real start."""
    run_file = tiny_task(
        tmp_path / "t", checkpoint={"every": "1 steps", "asynchronous": False}, data={"eval": [], "workers": 1}
    )
    config = read_config(run_file)
    model = tmp_path / "t" / "model" / "config.json"
    change_json(model, {"attention_dropout": 0.1})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    run = prepared_run(config, plan)
    state = replace(state_of({}), step=3, position=(0, 20), layout={"mesh": "dp 2"}, **asdict(inputs_of(run)))
    partial = Path(config.output_dir) / "checkpoints" / partial_name(3, "a")
    partial.mkdir(parents=True)
    linked = {"base/config.json": run.inputs.folder / "config.json"}
    new = Manifest(3, 1, (), "host", "a", None, {})
    commit(CommitJob(partial, new, {"state.json": state.text()}, linked), lambda: False)
    yield run
    dist.destroy_process_group()


def resumed(run: PreparedRun) -> tuple[ResumePoint, list[str]]:
    lines: list[str] = []
    point = find_resume_point(prepared_run(run.config, run.plan), lines.append)
    if point.lock is not None:
        point.lock.close()
    return point, lines


def test_an_edited_config_json_is_not_resumed_with(saved: PreparedRun) -> None:
    origin, lines = resumed(saved)
    assert origin.progress.step == 3
    assert not [line for line in lines if "changed" in line]
    changed = "attention_dropout 0.1 uses other random numbers than without the interruption: layout dp 2 -> dp 1"
    assert lines[-1] == changed
    file = saved.inputs.folder / "config.json"
    tree = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps(tree | {"rms_norm_eps": 0.5, "_name_or_path": "elsewhere"}))
    with pytest.raises(CheckpointError, match=r"base: rms_norm_eps 1e-06 -> 0\.5"):
        resumed(saved)


def test_a_renamed_checkpoint_is_not_resumed_from(saved: PreparedRun) -> None:
    """Not even where an older one could be taken: the renamed one would be lost."""
    checkpoints = Path(saved.config.output_dir) / "checkpoints"
    (checkpoints / step_name(3)).rename(checkpoints / step_name(30))
    with pytest.raises(CheckpointError, match="its name says step 30, but it is the checkpoint of step 3"):
        resumed(saved)


def test_a_run_that_is_past_its_end_is_refused(saved: PreparedRun) -> None:
    """It would export the weights of step 3 as those of a run of two steps."""
    origin, _ = resumed(saved)
    origin.check_not_past_end(steps=3, duration="3 steps")
    with pytest.raises(CheckpointError, match=r"is of step 3, and train\.for 2 steps ends after step 2"):
        origin.check_not_past_end(steps=2, duration="2 steps")


def test_rows_that_a_longer_run_does_not_see_are_printed(saved: PreparedRun) -> None:
    """The checkpoint is of step 3 with a batch of 8, and only 20 rows were given out when the run ended."""
    train = saved.config.train.model_copy(update={"duration": "2 epochs"})
    _, lines = resumed(replace(saved, plan=replace(saved.plan, train=train)))
    assert "4 rows of epoch 1 are left out: step 3 was the last one, and not full" in lines
