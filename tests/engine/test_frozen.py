"""Parameters that are not trained stay as they are under weight decay, in checkpoints and in what is exported."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.running import start, torchrun

ROUTERS = ("routers-3-bf16", "routers-3-fp32-tp", "routers-1-fp32-pp")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("frozen")
    done = start(torchrun(str(Path(__file__).with_name("frozen_worker.py")), str(folder)))
    assert done.returncode == 0, done.stderr[-4000:]
    cases: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return cases


@pytest.mark.parametrize("name", ["0-bf16", "2-fp32", "3-bf16"])
def test_parameters_without_a_gradient_do_not_shrink(name: str, found: dict[str, Any]) -> None:
    """The indexer of DeepSeek-V3.2, at stages whose weights are whole, in flat parts and partitioned."""
    case = found[name]
    assert [note for note in case["notes"] if note.startswith("frozen: 10 parameters that the loss does not reach")]
    assert case["changed"]
    assert not [changed for changed in case["changed"] if ".indexer." in changed]
    assert case["resumed"]


@pytest.mark.parametrize("name", ROUTERS)
def test_frozen_routers_stay_and_their_biases_move(name: str, found: dict[str, Any]) -> None:
    """With weights in parts of ranks, sharded by tensors, and by layers; a resumed run has the same biases."""
    case = found[name]
    assert (
        "frozen: 3 weights of routers, since router.train is false: model.layers.*.mlp.gate.weight (3)" in case["notes"]
    )
    assert not [changed for changed in case["changed"] if changed.endswith(".mlp.gate.weight")]
    biases = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]
    assert [changed for changed in case["changed"] if changed.endswith("bias")] == biases
    assert case["biases"]
    assert case["resumed"]
