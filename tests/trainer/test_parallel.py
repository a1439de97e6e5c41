"""Whole runs of two ranks that work on the same rows: the numbers of one rank, from the first step to the export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ds_finetune.runs.metrics import read_expert_table
from tests.json_files import change_json, read_json
from tests.running import metrics, start, tiny_task, torchrun

TRAIN = {"for": "6 steps"}
ROUTER = {"balance": 0.01, "bias_update": 0.001}
EVALUATION = {"every": "3 steps", "keep_best": True, "generate": {"prompts": 3, "max_new_tokens": 4}}


def _run(folder: Path, *, ranks: int, layers: int = 2, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    every = {"train": TRAIN, "eval": EVALUATION, "router": ROUTER, "checkpoint": {"every": "3 steps"}}
    run_file = tiny_task(folder, **every, **sections)
    config = folder / "model" / "config.json"
    change_json(config, {"num_hidden_layers": layers})
    done = start(torchrun("ds_finetune/train.py", str(run_file), ranks=ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    is_partitioned = ranks > 1 and sections["deepspeed"]["zero_optimization"]["stage"] == 3
    assert done.stderr.count("answers under ZeRO-3: with full weights, gathered once") == is_partitioned
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank without ZeRO."""
    return _run(tmp_path_factory.mktemp("alone"), ranks=1, deepspeed={"zero_optimization": {"stage": 0}})


@pytest.mark.parametrize(
    ("parallel", "stage"),
    [({"sp": 2}, 3), ({"tp": 2}, 2), ({"ep": 2}, 1), ({"pp": 2}, 1)],
    ids=["sp", "tp", "ep", "pp"],
)
def test_a_run_of_shared_rows_is_the_run_of_one_rank(
    alone: Path, tmp_path: Path, parallel: dict[str, int], stage: int
) -> None:
    shared = _run(tmp_path, ranks=2, parallel=parallel, deepspeed={"zero_optimization": {"stage": stage}})
    # Memory is traced with groups that torch does not know, while the watchdog records collectives.
    assert "memory of a rank: not known" not in (shared / "run" / "log.txt").read_text()
    ours, wanted = metrics(shared), metrics(alone)
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy", "eval/exact_match", "data/tokens_seen"):
        assert [r[key] for r in ours if key in r] == pytest.approx([r[key] for r in wanted if key in r], rel=1e-4), key
    _check_same_loads(shared, alone, ep=parallel.get("ep", 1))
    found, reference = (load_file(folder / "run" / "export" / "model.safetensors") for folder in (shared, alone))
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    assert read_json(shared / "run" / "export" / "config.json") == read_json(alone / "run" / "export" / "config.json")


@pytest.mark.slow
def test_a_run_with_several_chunks_a_rank_is_the_run_of_one_rank(tmp_path: Path) -> None:
    """Losses, evaluation, answers and the export are the same."""
    alone = _run(tmp_path / "alone", ranks=1, layers=4, deepspeed={"zero_optimization": {"stage": 0}})
    chunks = {"parallel": {"pp": 2, "vpp": 2}, "deepspeed": {"zero_optimization": {"stage": 1}}}
    shared = _run(tmp_path / "shared", ranks=2, layers=4, **chunks)
    ours, wanted = metrics(shared), metrics(alone)
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy", "eval/exact_match"):
        assert [r[key] for r in ours if key in r] == pytest.approx([r[key] for r in wanted if key in r], rel=1e-4), key
    found, reference = (load_file(folder / "run" / "export" / "model.safetensors") for folder in (shared, alone))
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def _check_same_loads(shared: Path, alone: Path, *, ep: int) -> None:
    """Every token is counted once, on whichever rank its router ran."""
    (layers, found), (wanted_layers, wanted) = (
        read_expert_table(folder / "run" / "experts.jsonl") for folder in (shared, alone)
    )
    assert layers == wanted_layers == [1]
    for field in ("step", "num_tokens", "counts"):
        assert found[field].tolist() == wanted[field].tolist(), field
    records = metrics(shared)
    assert found["num_tokens"].cumsum().tolist() == [record["data/tokens_seen"] for record in records]
    assert found["entropy"] == pytest.approx(wanted["entropy"], rel=1e-4)
    loads = found["counts"].reshape(len(records), ep, -1).sum(axis=2)
    ratios = loads.max(axis=1) / loads.mean(axis=1)
    assert [record.get("router/busiest_rank_ratio", 1.0) for record in records] == pytest.approx(ratios)
    drift = [record["router/bias_drift_max"] for record in metrics(alone)]
    assert [record["router/bias_drift_max"] for record in records] == drift
    assert 0 < drift[0] < max(drift)


@pytest.mark.parametrize(
    ("overrides", "model", "text"),
    [
        (["parallel.tp=4"], {}, "2 ranks are not a multiple of parallel tp 4 = 4"),
        (
            ["parallel.tp=2"],
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "parallel.tp 2 does not divide the 3 attention heads of the model",
        ),
        (["parallel.ep=2"], {"n_routed_experts": 3}, "parallel.ep 2 does not divide the 3 routed experts of the model"),
        (
            ["parallel.pp=2", "deepspeed.zero_optimization.stage=1"],
            {"num_hidden_layers": 1},
            "parallel.pp 2 is more than the 1 layers of the model",
        ),
        (
            ["parallel.sp=2", "train.max_seq_len=63", "data.packing=true"],
            {},
            "train.max_seq_len 63 is not a multiple of parallel.sp 2",
        ),
        (["parallel.pp=2"], {}, "parallel dp 1 x pp 2 with zero stage 2 is not tested"),
    ],
)
def test_bad_layouts_end_every_rank_within_two_minutes(
    tmp_path: Path, overrides: list[str], model: dict[str, int], text: str
) -> None:
    run_file = tiny_task(tmp_path)
    config = tmp_path / "model" / "config.json"
    change_json(config, model)
    done = start(torchrun("ds_finetune/train.py", str(run_file), *overrides), timeout=120)
    assert done.returncode != 0
    assert done.stderr.count(f"error: {text}") == 1, done.stderr
    assert not (tmp_path / "run").exists()
