"""The run directory is checked before anything is loaded."""

from pathlib import Path

import pytest

from ds_finetune.config import RunConfig
from ds_finetune.errors import OutputError
from ds_finetune.run_folder import check_output


def config_of(folder: Path, **sections: object) -> RunConfig:
    tree = {"model": "m", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "output_dir": str(folder)}
    return RunConfig.model_validate(tree | sections)


def test_a_disk_that_is_too_small_is_named_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        check_output(config_of(tmp_path / "run"), 10**15)
    assert "2 export(s) need 3725290.30 GiB and the disk has" in caught.value.message
    assert "eval.keep_best false" in caught.value.hint
    with pytest.raises(OutputError, match=r"1 export\(s\) need 3725290\.30 GiB"):
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
