"""Inexact options of DeepSpeed equal a plain loop where their own rules say so."""

from pathlib import Path

import pytest
import torch

from tests.parity.inexact_worker import CELLS
from tests.parity.reference import assert_equals_plain_loop, reference_steps
from tests.running import start, torchrun


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


def test_zenflow_is_exact_while_it_warms_up(results: Path, models: Path) -> None:
    result = torch.load(results / "zenflow.pt", weights_only=True)
    wanted = reference_steps(models / "llama", 0.5)
    assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    assert result["answers"] == wanted["answers"]
