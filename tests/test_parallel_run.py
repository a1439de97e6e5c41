"""Whole runs of two ranks that work on the same rows: the numbers of one rank, from the first step to the export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ds_finetune.run_folder import read_json
from tests.running import metrics, start, tiny_task, torchrun

TRAIN = {"for": "6 steps"}
EVALUATION = {"every": "3 steps", "keep_best": True, "generate": {"prompts": 3, "max_new_tokens": 4}}


def _run(folder: Path, *, ranks: int, **sections: Any) -> Path:
    run_file = tiny_task(folder, train=TRAIN, eval=EVALUATION, checkpoint={"every": "3 steps"}, **sections)
    done = start(torchrun("ds_finetune/train.py", str(run_file), ranks=ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank without ZeRO."""
    return _run(tmp_path_factory.mktemp("alone"), ranks=1, deepspeed={"zero_optimization": {"stage": 0}})


@pytest.mark.parametrize(("parallel", "stage"), [({"sp": 2}, 3), ({"tp": 2}, 2), ({"ep": 2}, 1), ({"pp": 2}, 1)], ids=["sp", "tp", "ep", "pp"])
def test_a_run_of_shared_rows_is_the_run_of_one_rank(alone: Path, tmp_path: Path, parallel: dict[str, int], stage: int) -> None:
    shared = _run(tmp_path, ranks=2, parallel=parallel, deepspeed={"zero_optimization": {"stage": stage}})
    ours, wanted = metrics(shared), metrics(alone)
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy", "eval/exact_match", "data/tokens_seen"):
        assert [r[key] for r in ours if key in r] == pytest.approx([r[key] for r in wanted if key in r], rel=1e-4), key
    found, reference = (load_file(folder / "run" / "export" / "model.safetensors") for folder in (shared, alone))
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    assert read_json(shared / "run" / "export" / "config.json") == read_json(alone / "run" / "export" / "config.json")
