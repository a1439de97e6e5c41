"""The run directory is checked before anything is loaded."""

from pathlib import Path

import pytest

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import OutputError
from ds_finetune.observers.record import StepRecord
from ds_finetune.plan.plan import make_plan
from ds_finetune.trainer.run_dir import check_output, write_run_files
from ds_finetune.world import World


def config_of(folder: Path, **sections: object) -> RunConfig:
    tree = {"model": "m", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "output_dir": str(folder)}
    return RunConfig.model_validate(tree | sections)


def test_a_disk_that_is_too_small_is_named_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        check_output(config_of(tmp_path / "run"), 10**15)
    assert "2 export(s) and 0 checkpoints need 3725290.30 GiB and the disk has" in caught.value.message
    assert "eval.keep_best false" in caught.value.hint
    with pytest.raises(OutputError, match=r"1 export\(s\) and 0 checkpoints need 3725290\.30 GiB"):
        check_output(config_of(tmp_path / "run", train={"precision": "fp32"}, eval={"keep_best": False}), 10**15)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_exported_needs_no_room(tmp_path: Path) -> None:
    check_output(config_of(tmp_path / "run", export={"at_end": False}, eval={"keep_best": False}), 10**15)
    check_output(config_of(tmp_path / "run"), None)
    assert list(tmp_path.iterdir()) == []


def test_no_permission_to_write() -> None:
    """/proc takes no files, not even root's."""
    with pytest.raises(OutputError, match="output_dir `/proc/sys/run`"):
        check_output(config_of(Path("/proc/sys/run")), None)


@pytest.mark.parametrize("folder", ["/proc/run", "/proc/self/run/deeper", "/sys/run"])
def test_where_no_folder_can_be_made(folder: str) -> None:
    """The permissions of /proc let root write, and no folder can be made there all the same."""
    with pytest.raises(OutputError, match=rf"output_dir `{folder}`: no"):
        check_output(config_of(Path(folder)), None)


def test_run_files_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    config = config_of(tmp_path)
    plan = make_plan(config, world=World(0, 1, 0, 1, "python"), device="cpu")
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        write_run_files(config, plan)


def test_checkpoints_need_room_for_one_more_than_are_kept(tmp_path: Path) -> None:
    wanted = {"export": {"at_end": False}, "eval": {"keep_best": False}, "checkpoint": {"keep": 3}}
    with pytest.raises(OutputError, match=r"0 export\(s\) and 5 checkpoints need 4656612\.87 GiB"):
        check_output(config_of(tmp_path / "run", **wanted), 10, checkpoint_bytes=10**15)
    check_output(config_of(tmp_path / "run", **wanted), 10, checkpoint_bytes=10)


def test_a_folder_that_holds_a_run_is_gone_on_with_or_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    with pytest.raises(OutputError, match="already holds a run"):
        check_output(config_of(run), None)
    (run / "checkpoints").mkdir()
    check_output(config_of(run), None)
    (run / "export").mkdir()
    for sections in ({}, {"checkpoint": {"resume": "never"}}, {"checkpoint": {"every": "never"}}):
        with pytest.raises(OutputError, match="already holds a run"):
            check_output(config_of(run, **sections), None)
    (run / "checkpoints" / "step-000003").mkdir()
    check_output(config_of(run), None)
    with pytest.raises(OutputError, match="already holds a run"):
        check_output(config_of(run, checkpoint={"resume": "never"}), None)


def test_records_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "train/loss": 1.0}}' for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "tra']))
    config = config_of(tmp_path)
    plan = make_plan(config, world=World(0, 1, 0, 1, "python"), device="cpu")
    write_run_files(config, plan, after_step=2, last=StepRecord(2, {"train/loss": 9.0}))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    write_run_files(config, plan, after_step=3, last=StepRecord(3, {"train/loss": 1.0}))
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines, (
        "the record of a step that was saved, and not written before the kill"
    )
    assert read_config(tmp_path / "config.yaml") == config
