"""The layouts in which policies of routers are compared with a plain loop, and the tiny models that they train."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ds_finetune.config.schema import RunConfig
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.experts import spread_ids
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, hf_config, router_section, run_tree

STEPS = 2


@dataclass(frozen=True)
class RouterLayout:
    """A cell and its number of ranks."""

    cell: Cell
    world: int

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        cell = self.cell
        rows = f"{'packed' if cell.packing else 'padded'}{'-recomputed' if cell.checkpointing else ''}"
        kind = f"{cell.family}-{cell.precision}" + ("" if cell.objective == "sft" else f"-{cell.objective}")
        return f"{cell.layout}-z{cell.stage}-{kind}-{rows}-acc{cell.accumulation}-{self.world}".replace(" ", "")


def config_of(layout: RouterLayout, model: Path, out: Path) -> RunConfig:
    """The run file of a layout."""
    cell = layout.cell
    tree = run_tree(cell, model, out, dp=layout.world // cell.sharing)
    return RunConfig.model_validate(tree | {"router": router_section(cell.family)})


def write_models(folder: Path) -> Path:
    """A tiny model of each family, whose biases lie around 5 and differ by less than bf16 could tell apart."""
    for family in {layout.cell.family for layout in layouts(worlds=(1, 2, 4))}:
        torch.manual_seed(17)
        model = AutoModelForCausalLM.from_config(hf_config(family)).float()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(5 + 1e-3 + 0.02 * torch.randperm(len(buffer)))
        spread_ids(model, getattr(model.config, "n_routed_experts", 0))
        model.save_pretrained(folder / family)
    return folder


@cache
def layouts(worlds: Sequence[int]) -> list[RouterLayout]:
    """Every layout on these numbers of ranks."""
    families = [name for name, family in FAMILIES.items() if family.router is not None and name in TINY_MODELS]
    plain = [
        RouterLayout(Cell(family, stage, accumulation, packing=packing, checkpointing=checkpointing), world)
        for family, stage, accumulation, packing, checkpointing in product(
            families, range(4), (1, 2), (True, False), (True, False)
        )
        for world in worlds
    ]
    shared = [
        RouterLayout(_cell(family, row.axes, stage, accumulation, packing=packing), world)
        for row in TESTED_LAYOUTS
        for family in families
        if family in row.families
        for stage, accumulation, packing in product(row.stages, (1, 2), (True, False))
        for world in worlds
    ]
    shared += [
        RouterLayout(replace(_cell(family, row.axes, stage, accumulation, packing=packing), vpp=2), world)
        for row in TESTED_LAYOUTS
        if "pp" in row.axes
        for family in families
        if family in row.families and f"{family}_deep" in TINY_MODELS
        for stage, accumulation, packing in product(row.stages, (2, 4), (True, False))
        for world in worlds
    ]
    others = [
        RouterLayout(Cell("deepseek_v3", stage, 2, packing=True, precision=precision, objective=objective), world)
        for stage, precision, objective in (
            (1, "bf16", "sft"),
            (3, "bf16", "sft"),
            (1, "fp32", "dpo"),
            (3, "fp32", "orpo"),
        )
        for world in worlds
    ]
    return [layout for layout in [*plain, *shared, *others] if _runs(layout.cell, layout.world)]


def _cell(family: str, axes: frozenset[str], stage: int, accumulation: int, *, packing: bool) -> Cell:
    deep = f"{family}_deep"
    name = deep if "pp" in axes and deep in TINY_MODELS else family
    return Cell(name, stage, accumulation, packing=packing, checkpointing=packing, **dict.fromkeys(axes, 2))


def _runs(cell: Cell, world: int) -> bool:
    return world % cell.sharing == 0 and world // (cell.tp * cell.pp) % cell.ep == 0
