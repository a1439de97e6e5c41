"""Sampled answers with made-up rewards, the variants of their loss, and the layouts in which it is compared with a plain
loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.families.configs import VOCAB
from ds_finetune.objectives.grpo import advantages
from ds_finetune.reference.selftest.cells import Cell, run_tree

GROUP, LR = 4, 1e-2
LENGTHS = (
    ((9, 3), (9, 12), (9, 40), (9, 1)),
    ((3, 20), (3, 22), (3, 5), (3, 9)),
    ((30, 2), (30, 31), (30, 7), (30, 16)),
    ((20, 40), (20, 38), (20, 30), (20, 39)),
)
"""Tokens of the prompt and of each answer of four groups; rows have 64."""
REWARDS = np.array([[1.0, 0.0, 0.3, 0.0], [0.1, 0.1, 0.1, 0.1], [0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 1.0]])
FORBIDDEN = (5, 6, VOCAB - 1)
"""Ids that are never drawn."""


@dataclass(frozen=True)
class Variant:
    """Keys of the section, which groups a step has, and whether it is taken with weights that have moved since the
    answers were sampled.
    """

    keys: Mapping[str, Any]
    groups: tuple[int, ...]
    is_old: bool = True


VARIANTS = (
    Variant({"kl_weight": 0.3}, (0,), is_old=False),
    Variant({"aggregation": "sequence", "advantage": "mean_std", "dual_clip": 1.2, "mismatch": "token"}, (0, 1, 2, 3)),
    Variant({"ratio": "sequence", "aggregation": "sequence", "clip_low": 0.02, "clip_high": 0.03}, (2, 1)),
    Variant({"ratio": "capped", "ratio_cap": 1.05, "aggregation": "fixed", "fixed_length": 25}, (0, 1, 2, 3)),
    Variant({"mismatch": "geometric", "mismatch_cap": 1.02, "advantage": "leave_one_out", "kl_weight": 0.1}, (2,)),
    Variant({"ratio": "sequence", "aggregation": "token", "clip_low": 0.05, "kl_weight": 0.2}, (1, 0)),
    Variant({"ratio": "capped", "ratio_cap": 1.1, "mismatch": "token"}, (2, 0)),
    Variant({"aggregation": "fixed", "fixed_length": 40, "kl_weight": 0.2}, (0, 1, 2, 3), is_old=False),
    Variant(
        {"ratio": "capped", "ratio_cap": 1.1, "aggregation": "sequence", "mismatch": "geometric"}, (0,), is_old=False
    ),
    Variant({"ratio": "sequence", "clip_low": 0.03, "aggregation": "fixed", "fixed_length": 30}, (2, 3)),
)
"""Each aggregation with each ratio, by steps of different numbers of forwards in one engine."""


def section(variant: Variant) -> GrpoObjective:
    """The section of the run file."""
    return GrpoObjective(name="grpo", group_size=GROUP, **variant.keys)


@dataclass(frozen=True)
class Sampled:
    """An answer, its prompt, and how far other log-probabilities of its tokens are from those of the first weights."""

    number: int
    prompt: list[int]
    ids: list[int]
    old: np.ndarray
    sampled: np.ndarray
    reference: np.ndarray


@cache
def answers() -> tuple[Sampled, ...]:
    """All answers by their number; those of a group have the same prompt."""
    rng = np.random.default_rng(11)
    allowed = np.array([token for token in range(3, VOCAB) if token not in FORBIDDEN])
    found: list[Sampled] = []
    for group in LENGTHS:
        prompt = rng.choice(allowed, size=group[0][0]).tolist()
        for _, length in group:
            old, sampled, reference = (0.1 * rng.normal(size=length).astype(np.float32) for _ in range(3))
            found.append(
                Sampled(len(found), prompt, rng.choice(allowed, size=length).tolist(), old, sampled, reference)
            )
    return tuple(found)


def answers_of(variant: Variant) -> list[tuple[Sampled, float]]:
    """The answers of a step, each with its advantage."""
    of_groups = advantages(REWARDS, section(variant).advantage)
    return [
        (answers()[group * GROUP + n], float(of_groups[group, n])) for group in variant.groups for n in range(GROUP)
    ]


@dataclass(frozen=True)
class Layout:
    """Where the loss is compared: a cell, its number of ranks, and which of VARIANTS."""

    cell: Cell
    world: int
    variants: tuple[int, ...] = tuple(range(len(VARIANTS)))

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        cell, rows = self.cell, "packed" if self.cell.packing else "padded"
        kind = f"{cell.family}{'-lora' if cell.has_lora else ''}{f'-{cell.offload}' if cell.offload != 'none' else ''}"
        once = "-once" if cell.reduces_once else ""
        return f"{cell.layout}-z{cell.stage}-{kind}-{rows}-acc{cell.accumulation}{once}-{self.world}".replace(" ", "")


def layout_tree(layout: Layout, model: Path, out: Path) -> dict[str, Any]:
    """The run file of a layout. It plans `accumulation` forwards of two rows, of which a step has more or fewer."""
    cell = layout.cell
    prompts = layout.world // cell.sharing * cell.accumulation
    tree = run_tree(cell, model, out, dp=layout.world // cell.sharing)
    tree["objective"] = {"name": "grpo", "group_size": 2}
    tree["rewards"] = ["exact_match"]
    tree["rollout"] = {"prompts_per_step": prompts, "max_new_tokens": 40}
    tree["train"] |= {"global_batch_size": 2 * prompts, "micro_batch_size": 2}
    return tree | ({"lora": {"rank": 4, "alpha": 8}} if cell.has_lora else {})


def layouts(worlds: Sequence[int]) -> list[Layout]:
    """Every layout on these numbers of ranks."""
    plain = [
        Layout(Cell(family, stage, accumulation, packing, checkpointing=packing, has_lora=has_lora), world)
        for family, stage, accumulation, packing in product(("llama", "deepseek_v3"), range(4), (1, 2), (True, False))
        for world in worlds
        for has_lora in ((False, True) if family == "llama" else (False,))
    ]
    plain += [
        replace(layout, cell=replace(layout.cell, **change))
        for layout in plain
        for least, change in ((1, {"offload": "optimizer"}), (2, {"reduces_once": True}), (3, {"offload": "param"}))
        if layout.cell.stage >= least and not layout.cell.has_lora
    ]
    shared = [
        Layout(Cell(family, stage, accumulation, packing, has_lora=has_lora, **{axis: 2}), world)  # type: ignore[arg-type]
        for axis, family, stage in product(("tp", "sp"), ("llama", "deepseek_v3"), range(4))
        for accumulation, packing, world in product((1, 2), (True, False), worlds)
        for has_lora in ((False, True) if family == "llama" else (False,))
        if world % 2 == 0
    ]
    divided = [
        Layout(Cell("deepseek_v3", stage, accumulation, packing, ep=2), 2)
        for stage, accumulation, packing in product(range(4), (1, 2), (True, False))
    ]
    return [*plain, *shared, *divided]
