"""Inexact options of DeepSpeed equal a plain loop where their own rules say so."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.config.schema import RunConfig
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import one_tensor
from tests.parity.inexact_worker import CELLS
from tests.parity.reference import assert_equals_plain_loop, reference_steps
from tests.running import start, torchrun

CONFIG: dict[str, Any] = {
    "model": "none",
    "data": {"train": "none.jsonl"},
    "train": {"for": "1 steps", "global_batch_size": 8, "micro_batch_size": 2, "max_seq_len": 64, "precision": "fp32"},
    "output_dir": "none",
}


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inexact")
    worker = Path(__file__).with_name("inexact_worker.py")
    done = start(torchrun(str(worker), str(models), str(out), ranks=4))
    assert done.returncode == 0, done.stderr[-9000:]
    return out


def test_hierarchical_partitions_change_no_number(results: Path, models: Path) -> None:
    result = torch.load(results / "hierarchical_partition.pt", weights_only=True)
    assert_equals_plain_loop(CELLS["hierarchical_partition"][0], result, models)


def test_the_second_weights_of_hierarchical_partitions_are_estimated(results: Path) -> None:
    """All but those of small parameters, which stay whole."""
    result = torch.load(results / "hierarchical_partition.pt", weights_only=True)
    tree = CONFIG | {"deepspeed": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}}
    tree |= {"inexact": "hierarchical_partition", "checkpoint": {"every": "never"}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, 4, 0, 4, "torchrun"), device="cpu")
    model = one_tensor(result["numel"])
    rows = {row.name: row for row in RunMemory(plan, model, without_activations(model)).estimate().rows}
    assert rows["second weights"].num_bytes == pytest.approx(result["second_bytes"], rel=0.02)
    assert rows["second weights"].place == "host"


def test_zenflow_is_exact_while_it_warms_up(results: Path, models: Path) -> None:
    result = torch.load(results / "zenflow.pt", weights_only=True)
    wanted = reference_steps(models / "llama", 0.5)
    assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    assert result["answers"] == wanted["answers"]
