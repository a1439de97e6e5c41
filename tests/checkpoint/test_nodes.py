"""Two nodes without a shared file system: each keeps its part, and what is missing is named."""

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_finetune.checkpoint.commit import complete_steps, step_name
from tests.checkpoint.runs import numbers
from tests.conftest import ROOT
from tests.forks import Forkserver
from tests.running import start, tiny_task

TRAIN = {"for": "6 steps", "global_batch_size": 4, "micro_batch_size": 1, "max_seq_len": 64, "precision": "fp32"}


def launch(run_file: Path, homes: Sequence[Path], *overrides: str) -> tuple[int, str]:
    """One rank in each folder, as so many nodes would start it; returns the worst exit code and what both printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [
        str(ROOT / "ds_finetune" / "train.py"),
        str(run_file),
        "output_dir=run",
        "deepspeed={zero_optimization: {stage: 3}}",
        *overrides,
    ]
    environ = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environ |= {"WORLD_SIZE": str(len(homes)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    nodes, logs = [], [home.with_suffix(".log") for home in homes]
    for number, (home, log) in enumerate(zip(homes, logs, strict=True)):
        home.mkdir(exist_ok=True)
        log.write_text("")
        nodes.append(
            Forkserver.get().start(program, environ | {"RANK": str(number)}, ranks=0, out=log, err=log, cwd=home)
        )
    codes = [node.wait(timeout=200) for node in nodes]
    return max(map(abs, codes)), "".join(log.read_text() for log in logs)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps that save at each."""
    return tiny_task(
        tmp_path_factory.mktemp("nodes") / "t",
        train=TRAIN,
        checkpoint={"every": "1 steps"},
        export={"at_end": False},
        eval=None,
    )


def test_folders_that_are_not_shared_are_refused_unless_said(run_file: Path, tmp_path: Path) -> None:
    code, text = launch(run_file, (tmp_path / "a", tmp_path / "b"))
    assert code != 0
    assert "is not the same folder as on rank 0" in text
    assert "set checkpoint.node_local: true" in text
    assert not (tmp_path / "a" / "run" / "metrics.jsonl").exists()


def test_each_node_keeps_its_part(run_file: Path, tmp_path: Path) -> None:
    homes = (tmp_path / "a", tmp_path / "b")
    local = "checkpoint.node_local=true"
    code, text = launch(run_file, homes, local)
    assert code == 0, text[-4000:]
    whole = numbers(homes[0] / "run")
    places = [home / "run" / "checkpoints" for home in homes]
    assert [complete_steps(place) for place in places] == [[5, 6], [5, 6]]
    assert [len(list((place / step_name(5)).glob("part-*"))) for place in places] == [1, 1]
    for place in places:
        shutil.rmtree(place / step_name(6))
    again, text = launch(run_file, homes, local)
    assert again == 0, text[-4000:]
    assert "step 5 of" in text
    assert numbers(homes[0] / "run") == whole

    gathered = start(
        [
            sys.executable,
            "-m",
            "ds_finetune",
            "checkpoint",
            "gather",
            str(tmp_path / "whole"),
            *(str(p / step_name(5)) for p in places),
        ]
    )
    assert gathered.returncode == 0, gathered.stderr
    alone = start(
        [
            sys.executable,
            "-m",
            "ds_finetune",
            "train",
            str(run_file),
            f"checkpoint.resume={tmp_path / 'whole'}",
            f"output_dir={tmp_path / 'c'}",
        ]
    )
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert numbers(tmp_path / "c")[0]["train/loss"] == pytest.approx(whole[5]["train/loss"], abs=1e-6)

    shutil.rmtree(places[1] / step_name(6))
    newer, text = launch(run_file, homes, local)
    assert newer == 0, text[-4000:]
    assert "step-000006 is skipped: rank 1 on" in text
    shutil.rmtree(places[1])
    code, text = launch(run_file, homes, local)
    assert code != 0
    assert "none of the 2 checkpoints in run/checkpoints can be used" in text
    one = start(
        [
            sys.executable,
            "-m",
            "ds_finetune",
            "export",
            "--no-verify",
            str(places[0] / step_name(6)),
            str(tmp_path / "d"),
        ]
    )
    assert one.returncode == 2
    assert "lacks part-00001-of-00002.safetensors" in one.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "stage"), [("pp", 0), ("pp", 1), ("tp", 0), ("tp", 2), ("ep", 0), ("ep", 3)])
def test_each_node_keeps_what_its_ranks_hold_of_a_model_in_parts(
    run_file: Path, tmp_path: Path, axis: str, stage: int
) -> None:
    """Four nodes of one rank each: two parts of the model, which two nodes each hold."""
    homes = [tmp_path / name for name in "abcd"]
    given = [f"parallel.{axis}=2", f"deepspeed.zero_optimization.stage={stage}", "checkpoint.node_local=true"]
    code, text = launch(run_file, homes, *given)
    assert code == 0, text[-4000:]
    whole = numbers(homes[0] / "run")
    places = [home / "run" / "checkpoints" for home in homes]
    for place in places:
        shutil.rmtree(place / step_name(6))
    again, text = launch(run_file, homes, *given)
    assert again == 0, text[-4000:]
    assert "step 5 of" in text
    assert numbers(homes[0] / "run") == whole
    command = [sys.executable, "-m", "ds_finetune"]
    parts = [str(place / step_name(5)) for place in places]
    gathered = start([*command, "checkpoint", "gather", str(tmp_path / "whole"), *parts])
    assert gathered.returncode == 0, gathered.stderr
    resumed = [f"checkpoint.resume={tmp_path / 'whole'}", f"output_dir={tmp_path / 'e'}"]
    alone = start([*command, "train", str(run_file), *resumed])
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert numbers(tmp_path / "e")[0]["train/loss"] == pytest.approx(whole[5]["train/loss"], abs=1e-6)
