"""Whole runs with `train.only` and `train.freeze`: what is announced, saved, resumed, exported and refused."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ds_finetune.cli.main import main
from ds_finetune.export.readers.sources import read_checkpoint
from tests.running import metrics, start, torchrun
from tests.trainer.test_lora import task

ONLY = ["experts", r".*\.0\.mlp\.down_proj", "norm", "lm_head"]
TRAINED = {
    *(
        f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"
        for number in range(4)
        for part in ("gate", "up", "down")
    ),
    *("model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two steps at ZeRO-2, resumed on two ranks at ZeRO-3 for a third one."""
    folder = tmp_path_factory.mktemp("freezing")
    run_file = task(folder, lora=None, train={"only": ONLY}, optim={"lr": 0.02, "weight_decay": 0.1})
    first = start([sys.executable, "ds_finetune/train.py", str(run_file), "train.for=2 steps"])
    assert first.returncode == 0, first.stdout + first.stderr
    done = start(torchrun("ds_finetune/train.py", str(run_file), "deepspeed.zero_optimization.stage=3"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, first.stdout


def test_the_plan_says_what_is_trained_and_what_is_not(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(finished[0] / "run.yaml")]) == 0
    base = load_file(finished[0] / "model" / "model.safetensors")
    base = {name: tensor for name, tensor in base.items() if not name.endswith("bias")}
    numel = sum(tensor.numel() for name, tensor in base.items() if name in TRAINED)
    # Both weights of routed experts are one tensor each in the model.
    total = len(base) - 12 + 2
    for printed in (finished[1], capsys.readouterr().out):
        rows = dict(line.strip().split("  ", 1) for line in printed.splitlines() if " tensors, " in line)
        assert f"5 of {total} tensors, {numel:,} parameters: " in rows["trained"]
        rest = sum(tensor.numel() for tensor in base.values()) - numel
        assert f"{total - 5} of {total} tensors, {rest:,} parameters: " in rows["frozen"]


def test_checkpoints_hold_what_is_trained_and_resume_elsewhere(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3]
    (newest,) = [each for each in (folder / "run" / "checkpoints").iterdir() if each.name.endswith("3")]
    experts = {f"model.layers.1.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")}
    source, buffers = read_checkpoint(newest)
    assert source.shapes.keys() - buffers == {*(n for n in TRAINED if "experts" not in n), *experts}


def test_only_what_is_named_has_moved_and_the_rest_has_its_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = finished[0]
    base, export = (load_file(folder / name / "model.safetensors") for name in ("model", "run/export"))
    assert base.keys() == export.keys()
    assert {name for name, tensor in export.items() if not tensor.equal(base[name])} == TRAINED
    assert main(["export", str(folder / "run"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    later = load_file(tmp_path / "out" / "model.safetensors")
    assert later.keys() == export.keys()
    assert all(later[name].equal(tensor) for name, tensor in export.items())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.only=[lm_haed]"], "train.only `lm_haed` matches no parameter hint: name one of lm_head"),
        (["train.freeze=['(']"], "train.freeze `(` is not a regular expression"),
        (["train.freeze=['.*']"], "train.freeze leaves no parameter that the objective trains"),
        (["train.only=[lm_head]", "lora.rank=8"], "with lora is not tested"),
        (["train.only=[lm_head]", "optim.name=Lion"], "with optim.name Lion is not tested"),
        (["train.only=[lm_head]", "router.train=false"], "with `router` is not tested"),
        (["train.freeze=[score]", "objective=reward"], "freezes score.weight, the head of objective reward"),
    ],
)
def test_what_cannot_be_is_one_error(
    overrides: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["plan", str(task(tmp_path, lora=None)), *overrides]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
