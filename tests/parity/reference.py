"""Compares cells with a plain single-process loop, and runs many cells in one launched group of ranks."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch import nn

from ds_finetune.families.configs import VOCAB
from ds_finetune.families.table import family_of
from ds_finetune.reference.selftest import reference_loop as reference
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell
from tests.parity.optimizers import plain_optimizer
from tests.running import start, torchrun

ACCELERATOR = os.environ.get("DS_ACCELERATOR", "cpu")
WORLDS = (1, 2) if ACCELERATOR == "cpu" or torch.cuda.device_count() > 1 else (1,)
_SECONDS = int(os.environ.get("CELL_TIMEOUT", "3600"))

Run = tuple[Cell, int]
"""A cell and the number of ranks it is run on."""


class Named(Protocol):
    """A layout whose name is the id of its test."""

    @property
    def name(self) -> str:
        """A name for files and test ids."""


def runs_of(cells: Sequence[Cell], worlds: Sequence[int] = WORLDS) -> list[Run]:
    """Every cell with each number of ranks that it runs on."""
    return [(cell, world) for cell in cells for world in worlds if is_for(cell, world)]


def ids_of(runs: Iterable[tuple[Named, int]]) -> list[str]:
    """Names of runs as parameters of tests."""
    return [f"{one.name}-{world}" for one, world in runs]


def launch(
    worker: str,
    runs: Iterable[tuple[object, int]],
    models: Path,
    out: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
) -> Path:
    """Let the file `worker` of this folder run dataclasses, each on a number of ranks, by one launch for each number;
    returns the folder `out` of the results.
    """
    given, chosen = out / "given.json", list(runs)
    for world in sorted({ranks for _, ranks in chosen}):
        given.write_text(json.dumps([asdict(one) for one, ranks in chosen if ranks == world]))  # type: ignore[call-overload]
        program = [str(Path(__file__).with_name(worker)), str(models), str(out), str(given), *arguments]
        done = start(torchrun(*program, ranks=world), environ, timeout=_SECONDS)
        assert done.returncode == 0, done.stderr[-9000:]
    return out


def run_cells(runs: Sequence[Run], models: Path, out: Path, *, environ: Mapping[str, str] | None = None) -> Path:
    """Run all cells, one launch for each number of ranks; returns the folder `out` of the results."""
    return launch("worker.py", runs, models, out, environ=environ)


def is_for(cell: Cell, world: int) -> bool:
    """Whether a cell runs on `world` ranks. Repeated starts catch races in reductions, which need several ranks."""
    return (
        world % cell.sharing == 0
        and world // (cell.tp * cell.pp) % cell.ep == 0
        and (world > cell.sharing or cell.start == 0)
    )


Layout = TypeVar("Layout", bound=Named)


def asked_for(request: pytest.FixtureRequest, layouts: Sequence[Layout]) -> list[Layout]:
    """Those whose tests this session runs, so that `-k` runs a part of a matrix."""
    names = [item.name for item in request.session.items]
    return [layout for layout in layouts if any(name.endswith(f"[{layout.name}]") for name in names)]


def runs_asked_for(request: pytest.FixtureRequest, runs: Sequence[tuple[Layout, int]]) -> list[tuple[Layout, int]]:
    """The same of runs, which are the parameters `cell` and `world` of tests."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    asked = [each.params for each in given if each is not None and each.params.keys() >= {"cell", "world"}]
    return [run for run in runs if any((each["cell"], each["world"]) == run for each in asked)]


def result_of(cell: Named, world: int, out: Path) -> dict[str, Any]:
    """The results of a cell on `world` ranks."""
    return torch.load(out / f"{cell.name}-world={world}.pt", weights_only=True)


GRADIENT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 8 * torch.finfo(torch.float32).eps * math.log(VOCAB)
"""Eight roundings of fp32 in a mean loss of random tokens, which is near log(VOCAB)."""


def assert_equals_plain_loop(cell: Cell, result: dict[str, Any], models: Path) -> None:
    """Compare loss, norm and the gradient of every parameter in the first step, the losses of the other steps, and
    greedy answers after them.
    """
    wanted = reference_steps(models / cell.family, cell.max_grad_norm)
    assert result["losses"][0] == pytest.approx(wanted["losses"][0], abs=LOSS_TOLERANCE)
    assert result["norms"][0] == pytest.approx(wanted["norms"][0], rel=GRADIENT_TOLERANCE)
    assert result["gradients"].keys() == wanted["gradients"].keys()
    # Some gradients are small differences of terms of the size of the others, as those of a gated delta net's A_log.
    rounding = torch.finfo(torch.float32).eps * wanted["norms"][0]
    wrong = {
        name: error
        for name, grad in wanted["gradients"].items()
        if (error := relative(result["gradients"][name], grad)) > GRADIENT_TOLERANCE and error * grad.norm() > rounding
    }
    assert not wrong
    assert result["losses"][1:] == pytest.approx(wanted["losses"][1:], rel=1e-4)
    has_state = family_of(TINY_MODELS[cell.family]["model_type"]).has_state
    assert result["answers"] == ([] if has_state else wanted["answers"])


def relative(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of `wanted`."""
    return float((result - wanted).norm() / wanted.norm().clamp_min(1e-12))


@cache
def reference_steps(
    folder: Path, max_grad_norm: float = 0.0, optimizer_name: str = "AdamW", weight_decay: float = 0.0
) -> dict[str, Any]:
    """Three steps of a plain loop with the published rule of an optimizer."""
    optimizer = partial(_optimizer, optimizer_name, weight_decay)
    return asdict(reference.reference_loop(folder, steps=3, max_grad_norm=max_grad_norm, optimizer=optimizer))


def _optimizer(name: str, weight_decay: float, model: nn.Module) -> Any:
    return plain_optimizer(name, model, weight_decay)
