"""Law 1: the gradient of a step and its loss equal those of a plain single-process loop, whatever the split."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ds_finetune.labels import IGNORE_INDEX
from tests.parity.cells import FAMILIES, Cell, hf_config, samples

WORKER = Path(__file__).with_name("worker.py")
GRADIENT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-6
STARTS_OF_STAGE_3 = 3


def _cells() -> list[Cell]:
    plain = [
        Cell(family, stage, accumulation, packing, start=start)
        for family, stage, accumulation, packing in itertools.product(FAMILIES, (0, 1, 2, 3), (1, 4), (False, True))
        for start in range(STARTS_OF_STAGE_3 if stage == 3 else 1)
    ]
    offloaded = [
        Cell(family, stage, accumulation, packing, offload=offload, start=start)
        for family, (stage, offload), accumulation, packing in itertools.product(
            FAMILIES, ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "param")), (1, 4), (False, True)
        )
        for start in range(STARTS_OF_STAGE_3 if stage == 3 else 1)
    ]
    clipped = [Cell("deepseek_v3", stage, 4, True, max_grad_norm=0.5, checkpointing=True) for stage in (0, 1, 2, 3)]
    return plain + offloaded + clipped


CELLS = _cells()
WORLDS = (1, 2)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tiny pre-trained-looking model of each family, in fp32."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(hf_config(family)).float().save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell run, all of a world size in one launch."""
    out = tmp_path_factory.mktemp("parity")
    (out / "cells.json").write_text(json.dumps([asdict(cell) for cell in CELLS]))
    for world in WORLDS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(WORKER)]
        done = subprocess.run(
            [*command, str(models), str(out), str(out / "cells.json")],
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return out


@cache
def _reference(folder: Path, max_grad_norm: float) -> dict[str, Any]:
    """Three steps of a plain loop, one unpadded sample at a time, logits and loss as transformers and torch give them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    supervised = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples())
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        loss_sum = 0.0
        for ids, labels in samples():
            logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]
            loss = functional.cross_entropy(logits, torch.from_numpy(labels).long(), ignore_index=IGNORE_INDEX, reduction="sum")
            (loss / supervised).backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        found["losses"].append(loss_sum / supervised)
        found["norms"].append(float(norm))
        if step == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell_equals_plain_loop(cell: Cell, world: int, results: Path, models: Path) -> None:
    found = torch.load(results / f"{cell.name}-world={world}.pt", weights_only=True)
    wanted = _reference(models / cell.family, cell.max_grad_norm)
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], abs=LOSS_TOLERANCE)
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=GRADIENT_TOLERANCE)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    wrong = {name: error for name, grad in wanted["gradients"].items() if (error := _relative(found["gradients"][name], grad)) > GRADIENT_TOLERANCE}
    assert not wrong
    assert found["losses"][1:] == pytest.approx(wanted["losses"][1:], rel=1e-4)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))
