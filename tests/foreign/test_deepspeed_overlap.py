"""Gradients of ZeRO 1 and 2 that are reduced beside backward: nothing is read or written before it should be."""

from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_finetune.engine.patches.deepspeed_engine import keep_reduced_gradients
from ds_finetune.engine.patches.deepspeed_init import forget_groups, without_shared_memory_op
from tests.stream_order import StreamOrder, imagined_streams

RANKS = 4
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all_reduce": {"zero": {"reduce_scatter": False}},
    "to_one_rank": {"zero": {"use_multi_rank_bucket_allreduce": False}},
    "apart": {"zero": {"contiguous_gradients": False}},
    "offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False},
    "accumulated_in_fp32": {"data_types": {"grad_accum_dtype": "fp32"}},
}


@pytest.fixture(params=[0, 3])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A rank of a world without the others: its collectives do nothing."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    try:
        with without_shared_memory_op():
            deepspeed.init_distributed(dist_init_required=False)
        yield request.param
    finally:
        dist.destroy_process_group()
        forget_groups()


def _order_of_steps(stage: int, zero: dict[str, Any], *, is_corrected: bool, **config: Any) -> StreamOrder:
    """Two steps of two micro-batches; one gradient is larger than a bucket, and owned by several ranks."""
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16) for _ in range(3))
    model = nn.Sequential(nn.Embedding(50, 16), *layers, nn.Linear(16, 50, bias=False)).bfloat16()
    config |= {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 400, **zero},
    }
    with imagined_streams() as order:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        if is_corrected:
            keep_reduced_gradients(engine.optimizer)
        for _ in range(4):
            engine.backward(engine(torch.randint(0, 50, (2, 8))).float().logsumexp(-1).mean())
            engine.step()
    engine.destroy()
    assert any(stream != "default" and "c10d" in operator for stream, operator in order.ran)
    return order


# train.reduction_dtype fp32 is refused with bf16 at ZeRO-1, where DeepSpeed takes another optimizer.
CELLS = [(stage, name) for stage in (1, 2) for name in CASES if (stage, name) != (1, "accumulated_in_fp32")]


@pytest.mark.parametrize(("stage", "name"), CELLS)
def test_reductions_beside_backward_race_with_nothing(rank: int, stage: int, name: str) -> None:
    case: dict[str, Any] = {"zero": {}, **CASES[name]}
    assert _order_of_steps(stage, is_corrected=True, **case).races == []


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_deepspeed_frees_a_large_gradient_that_is_being_reduced(rank: int) -> None:
    """What the correction is for; where this fails, DeepSpeed may not need it any more."""
    races = _order_of_steps(2, {}, is_corrected=False).races
    assert {"freed on default before aten.cat.default on stream 1"} < set(races)


@pytest.mark.parametrize("waits", [False, True])
def test_streams_that_do_not_wait_are_found(waits: bool) -> None:
    with imagined_streams() as order:
        other, numbers = order.new_stream(), torch.ones(4)
        if waits:
            other.wait_stream(order.current)
        with order.on(other):
            numbers.mul_(2)
    assert order.races == ([] if waits else ["aten.mul_.Tensor on stream 1 beside aten.ones.default on default"])
