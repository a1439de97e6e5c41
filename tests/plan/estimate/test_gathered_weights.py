"""Weights that ZeRO-3 has whole, against the most that DeepSpeed 0.19.8 was seen to have."""

from pathlib import Path

import pytest

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.zero_rows import DEFAULT_RULES, gathered_weights
from ds_finetune.plan.layer_stages import rank_weights
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import described_tree
from tests.plan.estimate.allocated_cells import LLAMA, AllocationCell
from tests.planning import few_bytes

TRACED = [
    (50_000_000, 10**9, 10**9, 10.227, 8.654),
    (1_000_000, 10**9, 0, 10.227, 8.654),
    (1_000_000, 3_000_000, 10**9, 10.227, 8.654),
    (1_000_000, 3_000_000, 3_000_000, 4.525, 4.329),
    (0, 10**9, 10**9, 10.227, 8.654),
]
"""Bucket, most live elements, reuse distance, and the millions of elements that two ranks had whole or on their way in
forward with the head, and in backward after it: those of the coordinator of a run of `LLAMA` at stage 3.
"""


@pytest.mark.parametrize(("bucket", "live", "reuse", "forward", "backward"), TRACED)
def test_as_many_as_were_traced(bucket: int, live: int, reuse: int, forward: float, backward: float) -> None:
    (weights,) = rank_weights(described_tree(LLAMA), ParallelConfig(), zero_ranks=2)
    rules = DEFAULT_RULES._replace(prefetch_bucket=bucket, max_live=live, max_reuse=reuse, persistence=1000)
    gathered = gathered_weights(weights.kinds, rules, passes=3, home="gpu", trains_embedding=True)
    in_forward, *_, in_backward = gathered
    assert in_forward.numel == pytest.approx(forward * 1e6, rel=0.06)
    assert in_backward.numel == pytest.approx(backward * 1e6, rel=0.06)


def test_the_last_stage_has_the_teacher(tmp_path: Path) -> None:
    cell = AllocationCell(1, "bf16", axis="pp", teacher=LLAMA, title="teacher")
    config = cell.config(tmp_path)
    plan = make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "a test"), device="cpu")
    model = described_tree(LLAMA, teacher=LLAMA)
    first, last = RunMemory(plan, model, few_bytes(model)).stages()
    names = {row.name for row in last.rows} - {row.name for row in first.rows}
    assert "weights of the teacher" in names
