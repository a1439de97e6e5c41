"""The run directory is checked before anything is loaded."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finetune import api
from ds_finetune.checkpoint.locking import lock_folder
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import OutputError
from ds_finetune.observers.record import StepRecord
from ds_finetune.plan.estimate.memory import DiskNeed, RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.metrics import SAMPLES, Sample
from ds_finetune.system.world import World
from ds_finetune.trainer.resume import best_weights_lines, move_later_exports
from ds_finetune.trainer.run_dir import (
    check_only_own_files,
    check_run_disk,
    check_run_folder,
    prepare_run_folder,
)
from ds_finetune.trainer.run_records import synchronise_records
from tests.described import one_tensor
from tests.planning import planned_run


def config_of(folder: Path, **sections: object) -> RunConfig:
    tree = {"model": "m", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "output_dir": str(folder)}
    return RunConfig.model_validate(tree | sections)


def check_folder_of(config: RunConfig) -> None:
    check_run_folder(Path(config.output_dir), config.checkpoint)


def check_files_of(config: RunConfig) -> None:
    check_only_own_files(Path(config.output_dir), config.inputs(), cache_dir=config.data.cache_dir)


def need_of(folder: Path, total: int, **sections: object) -> DiskNeed:
    """What a run of a model of `total` parameters writes."""
    config = config_of(folder, **sections)
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    model = one_tensor(total)
    return RunMemory(plan, model, without_activations(model)).files.of_host(plan, ranks=1, is_first_host=True)


def test_a_disk_that_is_too_small_is_named_with_both_sizes(tmp_path: Path) -> None:
    never = {"checkpoint": {"every": "never"}}
    with pytest.raises(OutputError) as caught:
        check_run_disk(tmp_path / "run", need_of(tmp_path / "run", 10**15, **never))
    assert "2 export(s) and 0 checkpoints need 3725290.30 GiB and the disk has" in caught.value.message
    assert "eval.keep_best: false" in caught.value.hint
    one = {"train": {"precision": "fp32"}, "eval": {"keep_best": False}} | never
    with pytest.raises(OutputError, match=r"1 export\(s\) and 0 checkpoints need 3725290\.30 GiB"):
        check_run_disk(tmp_path / "run", need_of(tmp_path / "run", 10**15, **one))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_written_needs_no_room(tmp_path: Path) -> None:
    nothing = {"export": {"at_end": False}, "eval": {"keep_best": False}, "checkpoint": {"every": "never"}}
    assert need_of(tmp_path / "run", 10**15, **nothing).num_bytes == 0
    served = {"objective": "grpo", "rewards": ["exact_match"], "rollout": {"engine": "vllm", "address": "http://a:1"}}
    assert need_of(tmp_path / "run", 10**15, **nothing, **served).exports == 1
    check_folder_of(config_of(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_no_permission_to_write() -> None:
    """/proc takes no files, not even root's."""
    with pytest.raises(OutputError, match="output_dir `/proc/sys/run`"):
        check_folder_of(config_of(Path("/proc/sys/run")))


@pytest.mark.parametrize("folder", ["/proc/run", "/proc/self/run/deeper", "/sys/run"])
def test_where_no_folder_can_be_made(folder: str) -> None:
    """The permissions of /proc let root write, and no folder can be made there all the same."""
    with pytest.raises(OutputError, match=rf"output_dir `{folder}`: no"):
        check_folder_of(config_of(Path(folder)))


def test_run_files_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    config = config_of(tmp_path)
    run = planned_run(config)
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        prepare_run_folder(run)


def test_checkpoints_need_room_for_one_more_than_are_kept(tmp_path: Path) -> None:
    wanted = {"export": {"at_end": False}, "eval": {"keep_best": False}, "checkpoint": {"keep": 3}}
    # A checkpoint has fp32 weight and two moments of each parameter.
    need = need_of(tmp_path / "run", 10**15, **wanted)
    assert (need.checkpoints, need.checkpoint_bytes) == (5, 12 * 10**15)
    with pytest.raises(OutputError, match=r"0 export\(s\) and 5 checkpoints need 55879354\.48 GiB"):
        check_run_disk(tmp_path / "run", need)
    check_run_disk(tmp_path / "run", need_of(tmp_path / "run", 10, **wanted))


def test_a_folder_that_holds_a_run_is_resumed_or_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    with pytest.raises(OutputError, match="already holds a run"):
        check_folder_of(config_of(run))
    (run / "checkpoints").mkdir()
    check_folder_of(config_of(run))
    (run / "export").mkdir()
    for sections in ({}, {"checkpoint": {"resume": "never"}}, {"checkpoint": {"every": "never"}}):
        with pytest.raises(OutputError, match="already holds a run"):
            check_folder_of(config_of(run, **sections))
    (run / "checkpoints" / "step-000003").mkdir()
    check_folder_of(config_of(run))
    with pytest.raises(OutputError, match="already holds a run"):
        check_folder_of(config_of(run, checkpoint={"resume": "never"}))


MINE = (
    "config.yaml",
    "plan.json",
    "data.json",
    "run.yaml",
    "checkpoints/step-000003/a",
    "base/config.json",
    "watchdog.txt",
)


@pytest.mark.parametrize("name", MINE)
def test_files_that_no_run_wrote_are_never_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(
        OutputError, match=rf"output_dir `.*run` is not empty and holds no run: {name.partition('/')[0]}\n"
    ):
        check_files_of(config_of(tmp_path / "run"))


def test_what_is_there_before_a_run_is_kept(tmp_path: Path) -> None:
    """Of a launcher, a watchdog, a scheduler, the shell, and an earlier start that was killed while it read its data."""
    run = tmp_path / "run"
    for name in ("logs/r1/attempt-1/rank-0.log", "watchdog/rank-00000.txt", "slurm-1.out", "train.log", ".trial-x/y"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    (run / "cache" / "rows").mkdir(parents=True)
    config = config_of(run, data={"train": "a.jsonl", "cache_dir": str(run / "cache" / "rows")})
    check_files_of(config)
    (run / "notes.txt").touch()
    with pytest.raises(OutputError, match=r"holds no run: notes\.txt\n"):
        check_files_of(config)


def test_a_folder_of_a_run_may_hold_anything_else(tmp_path: Path) -> None:
    """`check_only_own_files` raises for the same files in a folder that holds no run, as in the test above."""
    for name in ("begun", "killed before its first step"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
    config = config_of(tmp_path / "begun")
    prepare_run_folder(planned_run(config))
    check_files_of(config)
    lock_folder(make_folder(tmp_path / "killed before its first step" / "checkpoints"), seconds=1, say=print).close()
    check_files_of(config_of(tmp_path / "killed before its first step"))


@pytest.mark.parametrize("place", ["run", "link"])
@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("data.train", {"data": {"train": "{run}/a.jsonl:train"}}),
        ("data.train", {"data": {"train": {"{run}/a.jsonl": 1.0, "b.jsonl": 2.0}}}),
        ("data.eval", {"data": {"train": "a.jsonl", "eval": {"new": "{run}/a.jsonl"}}}),
        ("model.path", {"model": "{run}"}),
        ("model.path", {"model": "{run}/export"}),
        ("model.tokenizer", {"model": {"path": "m", "tokenizer": "{run}/export"}}),
        ("data.template", {"data": {"train": "a.jsonl", "template": "{run}/a.jsonl"}}),
        ("objective.teacher", {"objective": {"name": "distill", "teacher": "{run}/export"}}),
        ("objective.scores", {"objective": {"name": "distill", "scores": "{run}/export"}}),
        ("deepspeed", {"deepspeed": "{run}/a.jsonl"}),
    ],
)
def test_inputs_in_the_run_folder_are_refused_by_name(
    key: str, sections: dict[str, Any], place: str, tmp_path: Path
) -> None:
    """Also where the folder holds a run, and where the input is named by a link to the folder."""
    run = tmp_path / "run"
    config = config_of(run)
    prepare_run_folder(planned_run(config))
    (run / "export").mkdir()
    (run / "a.jsonl").touch()
    (tmp_path / "link").symlink_to(run)
    check_files_of(config)
    tree = json.loads(json.dumps(sections).replace("{run}", str(tmp_path / place)))
    with pytest.raises(
        OutputError, match=rf"^{re.escape(key)} `.*` is in output_dir `{run}`, where a run replaces files"
    ):
        check_files_of(config_of(run, **tree))


def test_training_keeps_rows_that_have_the_name_of_a_record(tmp_path: Path) -> None:
    rows = make_folder(tmp_path / "m") / "data.json"
    rows.write_text('[{"text": "mine"}]')
    with pytest.raises(OutputError, match=r"data\.train `.*data\.json` is in output_dir"):
        api.train(config_of(tmp_path / "m", data={"train": str(rows)}))
    with pytest.raises(OutputError, match=r"holds no run: data\.json"):
        api.train(config_of(tmp_path / "m"))
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["data.json"]
    assert rows.read_text() == '[{"text": "mine"}]'


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_records_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "train/loss": 1.0}}' for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "tra']))
    run = planned_run(config_of(tmp_path))
    others = ("ranks.jsonl", "samples.jsonl", "rollouts.jsonl", "experts.jsonl")
    for name in others:
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    prepare_run_folder(run, after_step=2, last=StepRecord(2, {"train/loss": 9.0}))
    assert [(tmp_path / name).read_text().splitlines() for name in ("metrics.jsonl", *others)] == [lines[:2]] * 5
    prepare_run_folder(run, after_step=3, last=StepRecord(3, {"train/loss": 1.0}))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines, (
        "the record of a step that was saved, and not written before the kill"
    )
    assert read_config(tmp_path / "config.yaml") == run.config


def test_a_resume_keeps_samples_with_any_character(tmp_path: Path) -> None:
    """JSON leaves U+2028, U+2029 and U+0085 as they are, and a kill may cut a line within a character."""
    answers = ["1\u20282\u20283", "4\u20295", "6\u00857", "8"]
    samples = [Sample(step, "eval", "prompt", answer, "") for step, answer in enumerate(answers, start=1)]
    written = [sample.line().encode() for sample in samples]
    damaged = [b'[{"step": 1}]\n', b'{"step": null}\n', b'{"step": 1, "answer": "\xe2\x80\n', b"[" * 100_000 + b"\n"]
    (tmp_path / "samples.jsonl").write_bytes(b"".join([*damaged, *written])[:-3] + b"\xc3")
    config = config_of(tmp_path)
    prepare_run_folder(planned_run(config), after_step=3, last=None)
    assert (tmp_path / "samples.jsonl").read_bytes() == b"".join(written[:3])
    assert [record["answer"] for record in RunFolder(tmp_path).records(SAMPLES)] == answers[:3]


def test_the_best_weights_of_the_folder_that_is_resumed_elsewhere_are_named(tmp_path: Path) -> None:
    state: Any = SimpleNamespace(observers={"best": {"best_step": 4}})
    found: Any = SimpleNamespace(folder=tmp_path / "old" / "checkpoints" / "step-000006", state=state)
    new, old = (planned_run(config_of(tmp_path / name)) for name in ("new", "old"))
    (line,) = best_weights_lines(found, new)
    assert "STEP 4, AND" in line
    assert f"{tmp_path / 'old'} HAS NO EXPORT OF ITS WEIGHTS" in line
    best = tmp_path / "old" / "export-best"
    best.mkdir(parents=True)
    losses = "".join(f'{{"step": {step}, "eval/loss": {loss}}}\n' for step, loss in ((2, 3), (4, 2), (6, 2), (8, 2.5)))
    (tmp_path / "old" / "metrics.jsonl").write_text(losses)
    assert best_weights_lines(found, old) == []
    (line,) = best_weights_lines(found, new)
    assert "of step 4, and" in line
    assert best_weights_lines(found, new, StepRecord(9, {}, best_step=4)) == [line]
    assert best_weights_lines(found, new, StepRecord(9, {}, best_step=9)) == []
    assert line.endswith(str(best))
    # The run resumed from the checkpoint, and a later evaluation was better.
    (tmp_path / "old" / "metrics.jsonl").write_text(losses + '{"step": 10, "eval/loss": 1}\n')
    found.folder.with_name("step-000004").mkdir(parents=True)
    for run, other in ((new, f"; {best} is of step 10"), (old, "")):
        (line,) = best_weights_lines(found, run)
        assert f"HAS NO EXPORT OF ITS WEIGHTS{other}; `ds-finetune export" in line
        assert "step-000004 OUT` exports them" in line
    # Rewards are best where they are highest, and a record of the export itself counts first.
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 4, "eval/reward": 1}\n{"step": 6, "eval/reward": 0}\n')
    assert best_weights_lines(found, old) == []
    (best / "verification.json").write_text('{"step": 6}')
    assert "export-best is of step 6" in best_weights_lines(found, new)[0]


@pytest.mark.parametrize("named", ["old", "old/checkpoints", "old/checkpoints/step-000004"])
def test_the_best_weights_of_the_run_that_was_resumed_first_are_named(named: str, tmp_path: Path) -> None:
    """A second start of the same command resumes from its own folder, and the best weights are still in the other."""
    config = config_of(tmp_path / "new")
    resumed = config.checkpoint.model_copy(update={"resume": str(tmp_path / named)})
    run = planned_run(config.model_copy(update={"checkpoint": resumed}))
    best = tmp_path / "old" / "export-best"
    best.mkdir(parents=True)
    (best / "verification.json").write_text('{"step": 4}')
    for step, expected in ((4, f"of step 4, and its weights are {best}"), (8, "STEP 8, AND")):
        state: Any = SimpleNamespace(observers={"best": {"best_step": step}})
        found: Any = SimpleNamespace(folder=tmp_path / "new" / "checkpoints" / "step-000009", state=state)
        (line,) = best_weights_lines(found, run)
        assert expected in line
    # The checkpoint is older than the export, so the new run trained step 4 itself.
    resumed = resumed.model_copy(update={"resume": str(tmp_path / "old" / "checkpoints" / "step-000002")})
    found.state.observers["best"]["best_step"] = 4
    (line,) = best_weights_lines(found, planned_run(config.model_copy(update={"checkpoint": resumed})))
    assert "STEP 4, AND" in line


def test_best_weights_of_steps_that_are_trained_again_are_moved_aside(tmp_path: Path) -> None:
    messages: list[str] = []
    for name, step in (("export-best", 6), ("adapter-best", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / "export-best" / "verification.json").write_text(f'{{"step": {step}}}')
    move_later_exports(tmp_path, 6, messages.append)
    assert messages == []
    move_later_exports(tmp_path, 4, messages.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter-best-of-step-6-1", "export-best-of-step-6-1"]
    assert "export-best is of step 6, which is trained again" in messages[0]


@pytest.mark.parametrize("name", ["link", "link/run"])
def test_a_link_to_nothing_is_no_output_dir(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match=f"is a link to `{re.escape(str(tmp_path / 'gone'))}`, which does not exist"):
        check_folder_of(config_of(tmp_path / name))


def test_a_resume_names_steps_without_a_record(tmp_path: Path) -> None:
    run = planned_run(config_of(tmp_path))
    lines = "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in (1, 2, 5, 9))
    (tmp_path / "metrics.jsonl").write_text(lines)
    said = prepare_run_folder(run, after_step=8, last=StepRecord(8, {"train/loss": 1.0}))
    assert "metrics.jsonl LACKS THE RECORDS OF STEPS 3-4, 6-7: " in said
    (tmp_path / "metrics.jsonl").write_text("")
    assert "OF STEPS 1-8: " in prepare_run_folder(run, after_step=8)
    # The first start of this folder has resumed the checkpoint of another one.
    (tmp_path / "starts.jsonl").write_text('{"after_step": 6}\n{"after_step": 7}\n')
    assert "OF STEPS 7-8: " in prepare_run_folder(run, after_step=8)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    assert not prepare_run_folder(run, after_step=8)
    assert not prepare_run_folder(planned_run(config_of(tmp_path / "new")), after_step=8)


def test_records_are_on_the_disk_when_they_are_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"metrics.jsonl", "samples.jsonl", "log.txt", "starts.jsonl"}
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    for name in names:
        (tmp_path / name).write_text("x")
    synchronise_records(tmp_path)
    assert synced == {tmp_path.stat().st_ino, *((tmp_path / name).stat().st_ino for name in names)}
