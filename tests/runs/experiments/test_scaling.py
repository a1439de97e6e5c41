"""The comparison of ranks and layouts: what is run, what is computed from it, and what is refused."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune.errors import ConfigError, LaunchError, OutputError, RunError
from ds_finetune.runs.experiments.jobs import ShortRuns, slot_on_hosts
from ds_finetune.runs.experiments.scaling import COLUMNS, compare_scaling, largest_difference

FAKE = (sys.executable, str(Path(__file__).with_name("fake_scaling.py")))


def compare(folder: Path, **keys: object) -> list[tuple[str, ...]]:
    """A comparison of a run file that evaluates and saves."""
    tree = {
        "model": "m",
        "data": {"train": "t.jsonl", "eval": "e.jsonl"},
        "train": {"global_batch_size": 12, "micro_batch_size": 2},
        "deepspeed": "zero2_offload",
        "eval": {"every": "1 steps"},
        "output_dir": "unused",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    given: dict[str, Any] = {"overrides": (), "ranks": (1, 2, 3), "layouts": ("",), "steps": 8, **keys}
    runs = ShortRuns(folder / "run.yaml", given["overrides"], given["steps"], keys.get("folder", folder / "out"))  # type: ignore[arg-type]
    variants = [(ranks, layout) for layout in given["layouts"] for ranks in given["ranks"]]
    return compare_scaling(runs, variants, hostfile=None, say=given.get("say", lambda _: None))


def test_speed_efficiency_shares_memory_and_losses(tmp_path: Path) -> None:
    rows = compare(tmp_path)
    assert COLUMNS == ("", "s/step", "tokens/s", "speed-up", "efficiency", "GiB", "loss off by")
    assert rows == [
        ("1 rank", "1.000", "1,000", "1.00", "100%", "4.00", "0.0e+00"),
        ("2 ranks", f"{2**-0.5:.3f}", "1,414", "1.41", "71%", "2.00", "3.0e-03"),
        ("3 ranks", f"{3**-0.5:.3f}", "1,732", "1.73", "58%", "1.33", "0.0e+00"),
    ]
    run = yaml.safe_load((tmp_path / "out" / "2-ranks" / "run.yaml").read_text())
    assert run["train"] == {"global_batch_size": 12, "micro_batch_size": 2, "for": "8 steps"}
    assert "eval" not in run


def test_layouts_change_the_run_file(tmp_path: Path) -> None:
    compare(tmp_path, ranks=(2,), layouts=("zero2", "tp2+zero3"))
    files = [
        yaml.safe_load((tmp_path / "out" / name / "run.yaml").read_text())
        for name in ("2-ranks-zero2", "2-ranks-tp2+zero3")
    ]
    assert files[0]["deepspeed"]["zero_optimization"]["stage"] == 2
    assert "offload_optimizer" in files[0]["deepspeed"]["zero_optimization"]
    assert files[1]["deepspeed"]["zero_optimization"]["stage"] == 3
    assert files[1]["parallel"] == {"tp": 2}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"ranks": (5,)}, "5 ranks cannot run: .*12.*"),
        ({"layouts": ("tp4",)}, "1 rank, tp4 cannot run: "),
        ({"layouts": ("fast",)}, "`fast`, which is not a layout"),
        ({"steps": 3}, "--steps 3 is too few"),
        ({"overrides": ("optim.rate=1",)}, r"unknown key `optim\.rate`"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    tmp_path: Path, keys: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        compare(tmp_path, **keys)
    assert not (tmp_path / "out").exists()


def test_too_few_gpus_are_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(LaunchError, match="need 3 GPUs, but 2 are visible"):
        compare(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_failed_run_is_a_reason_and_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    lines: list[str] = []
    rows = compare(tmp_path, ranks=(2,), layouts=("tp2+zero2", "zero1"), say=lines.append)
    assert [row[0] for row in rows] == ["2 ranks, zero1"]
    assert lines == ["2 ranks, tp2+zero2: FAILED: exit code 1: it fails", "2 ranks, zero1: done"]
    with pytest.raises(OutputError, match="exists already"):
        compare(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(RunError, match=r"all variants failed; 2 ranks, tp2\+zero2: exit code 1: it fails"):
        compare(other, ranks=(2,), layouts=("tp2+zero2",))


def test_a_loss_that_is_no_number_differs_without_bounds() -> None:
    assert largest_difference([1.0, 1.1], [1.0, 1.0]) == pytest.approx(0.1)
    assert largest_difference([1.0, math.nan], [1.0, 1.0]) == math.inf
    assert largest_difference([1.0, math.inf], [1.0, 1.0]) == math.inf
    assert largest_difference([0.0], [0.0]) == 0


def test_ranks_take_the_first_slots_of_hosts(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=2\nc slots=4\n")
    included = {ranks: slot_on_hosts(str(hosts), ranks).options[-1] for ranks in (2, 4, 7)}
    assert included == {2: "a:0,1", 4: "a:0,1,2,3", 7: "a:0,1,2,3@b:0,1@c:0"}
    with pytest.raises(LaunchError, match="hosts has 10 slots, too few for 11 ranks"):
        slot_on_hosts(str(hosts), 11)
    # `--include a:0` would select a device of both lines, and start two ranks.
    hosts.write_text("a:22 slots=4\na:2222 slots=4\n")
    with pytest.raises(LaunchError, match="names host `a`, but lines 1 and 2 of the hostfile both have this name"):
        slot_on_hosts(str(hosts), 1)
