"""The run directory is checked before anything is loaded."""

from pathlib import Path

import pytest

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import OutputError
from ds_finetune.estimate.states import DiskNeed, ModelSizes, estimate_run
from ds_finetune.observers.record import StepRecord
from ds_finetune.plan.plan import make_plan
from ds_finetune.runs.samples import Sample, read_samples
from ds_finetune.trainer.run_dir import check_run_disk, check_run_folder, prepare_run_folder
from ds_finetune.world import World


def config_of(folder: Path, **sections: object) -> RunConfig:
    tree = {"model": "m", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "output_dir": str(folder)}
    return RunConfig.model_validate(tree | sections)


def need_of(folder: Path, total: int, **sections: object) -> DiskNeed:
    """What a run of a model of `total` parameters writes."""
    config = config_of(folder, **sections)
    plan = make_plan(config, world=World(0, 1, 0, 1, "a test"), device="cpu")
    return estimate_run(config, plan, ModelSizes(total, total, total)).disk(ranks=1, is_first_host=True)


def test_a_disk_that_is_too_small_is_named_with_both_sizes(tmp_path: Path) -> None:
    never = {"checkpoint": {"every": "never"}}
    with pytest.raises(OutputError) as caught:
        check_run_disk(tmp_path / "run", need_of(tmp_path / "run", 10**15, **never))
    assert "2 export(s) and 0 checkpoints need 3725290.30 GiB and the disk has" in caught.value.message
    assert "eval.keep_best false" in caught.value.hint
    one = {"train": {"precision": "fp32"}, "eval": {"keep_best": False}} | never
    with pytest.raises(OutputError, match=r"1 export\(s\) and 0 checkpoints need 3725290\.30 GiB"):
        check_run_disk(tmp_path / "run", need_of(tmp_path / "run", 10**15, **one))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_written_needs_no_room(tmp_path: Path) -> None:
    nothing = {"export": {"at_end": False}, "eval": {"keep_best": False}, "checkpoint": {"every": "never"}}
    assert need_of(tmp_path / "run", 10**15, **nothing).num_bytes == 0
    check_run_folder(config_of(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_no_permission_to_write() -> None:
    """/proc takes no files, not even root's."""
    with pytest.raises(OutputError, match="output_dir `/proc/sys/run`"):
        check_run_folder(config_of(Path("/proc/sys/run")))


@pytest.mark.parametrize("folder", ["/proc/run", "/proc/self/run/deeper", "/sys/run"])
def test_where_no_folder_can_be_made(folder: str) -> None:
    """The permissions of /proc let root write, and no folder can be made there all the same."""
    with pytest.raises(OutputError, match=rf"output_dir `{folder}`: no"):
        check_run_folder(config_of(Path(folder)))


def test_run_files_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    config = config_of(tmp_path)
    plan = make_plan(config, world=World(0, 1, 0, 1, "python"), device="cpu")
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        prepare_run_folder(config, plan)


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
        check_run_folder(config_of(run))
    (run / "checkpoints").mkdir()
    check_run_folder(config_of(run))
    (run / "export").mkdir()
    for sections in ({}, {"checkpoint": {"resume": "never"}}, {"checkpoint": {"every": "never"}}):
        with pytest.raises(OutputError, match="already holds a run"):
            check_run_folder(config_of(run, **sections))
    (run / "checkpoints" / "step-000003").mkdir()
    check_run_folder(config_of(run))
    with pytest.raises(OutputError, match="already holds a run"):
        check_run_folder(config_of(run, checkpoint={"resume": "never"}))


def test_records_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "train/loss": 1.0}}' for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "tra']))
    config = config_of(tmp_path)
    plan = make_plan(config, world=World(0, 1, 0, 1, "python"), device="cpu")
    prepare_run_folder(config, plan, after_step=2, last=StepRecord(2, {"train/loss": 9.0}))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    prepare_run_folder(config, plan, after_step=3, last=StepRecord(3, {"train/loss": 1.0}))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines, (
        "the record of a step that was saved, and not written before the kill"
    )
    assert read_config(tmp_path / "config.yaml") == config


def test_a_resume_keeps_samples_with_any_character(tmp_path: Path) -> None:
    """JSON leaves U+2028, U+2029 and U+0085 as they are, and a kill may cut a line within a character."""
    answers = ["1\u20282\u20283", "4\u20295", "6\u00857", "8"]
    samples = [Sample(step, "eval", "prompt", answer, "") for step, answer in enumerate(answers, start=1)]
    written = [sample.line().encode() for sample in samples]
    damaged = [b'[{"step": 1}]\n', b'{"step": null}\n', b'{"step": 1, "answer": "\xe2\x80\n', b"[" * 100_000 + b"\n"]
    (tmp_path / "samples.jsonl").write_bytes(b"".join([*damaged, *written])[:-3] + b"\xc3")
    config = config_of(tmp_path)
    prepare_run_folder(
        config, make_plan(config, world=World(0, 1, 0, 1, "python"), device="cpu"), after_step=3, last=None
    )
    assert (tmp_path / "samples.jsonl").read_bytes() == b"".join(written[:3])
    assert read_samples(tmp_path / "samples.jsonl") == samples[:3]
