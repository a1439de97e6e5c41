"""Copies of weights on several ranks are compared bit by bit before a checkpoint and an export."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.replicas_worker import CASES, NORM, THRESHOLDS
from tests.running import start, tiny_task, torchrun

WORKER = str(Path(__file__).with_name("replicas_worker.py"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("replicas")
    done = start(torchrun(WORKER, str(folder)))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_one_unit_in_the_last_place_is_an_error_on_every_rank(found: list[dict[str, Any]], name: str) -> None:
    (equal, message), other = (rank[name] for rank in found)
    assert other == [equal, message]
    assert equal == ""
    weight = CASES[name][1]
    assert message.startswith(f"copies of a weight on several ranks differ: {weight}, element 3: "), message
    first, second = message.partition("element 3: ")[2].split(" and ")
    values = [np.float32(side.partition(" on rank ")[0]) for side in (first, second)]
    assert [side.partition(" on rank ")[2] for side in (first, second)] == ["0", "1"]
    assert values[1] == np.nextafter(values[0], np.float32("inf"))


def test_zero_3_needs_a_persistent_weight_where_gathers_overlap(found: list[dict[str, Any]]) -> None:
    """The smallest weights of the model, the norms of the compressed keys, have 16 elements."""
    messages = dict(zip(THRESHOLDS, found[0]["persistent"], strict=True))
    assert messages[16, 100] == messages[100, 16] == ""
    for pair in ((15, 100), (100, 15), (1, 1)):
        param, model = pair
        assert f"param_persistence_threshold {param} and stage3_model_persistence_threshold {model}" in messages[pair]
        assert "kv_a_layernorm.weight, has 16 elements" in messages[pair]
        assert "raise both thresholds to 16" in messages[pair]


def test_a_run_ends_before_it_saves_what_differs(tmp_path: Path) -> None:
    """The checkpoint of the first step stays, and neither the second one nor an export is written."""
    run_file = tiny_task(tmp_path, parallel={"tp": 2}, checkpoint={"every": "1 steps"}, eval=None)
    done = start(torchrun(WORKER, str(run_file), NORM))
    assert done.returncode == 1, done.stderr
    assert "copies of a weight on several ranks differ: model.norm.weight, element 3: " in done.stderr
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == ["step-000001"]
    assert not (tmp_path / "run" / "export").exists()
