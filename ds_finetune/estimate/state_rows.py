"""Weights, gradients and optimizer states of a rank."""

from collections.abc import Iterator

from ds_finetune.config.schema import RunConfig
from ds_finetune.estimate.rank_weights import RankWeights, part_of
from ds_finetune.estimate.rows import MemoryRow, Place
from ds_finetune.estimate.states import STAGE_WITH_PARTITIONED_WEIGHTS, TensorKind
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.families.table import family_of
from ds_finetune.plan.combinations import WEIGHT_BYTES
from ds_finetune.plan.deepspeed_config import MOMENTS
from ds_finetune.plan.plan import Plan

_WIDE = 4
_STAGE = "deepspeed.zero_optimization.stage"


def is_trained(config: RunConfig, model: ModelConfig, kind: TensorKind) -> bool:
    """Whether a run without LoRA trains a tensor: indexers are trained by a loss of their own, routers unless the run
    file says otherwise.
    """
    part = part_of(kind.name)
    if family_of(str(model["model_type"])).indexer is not None and config.indexer.train:
        if config.indexer.stage == "dense_warmup":
            return part == "indexer"
    elif part == "indexer":
        return False
    return part != "router" or config.router is None or config.router.train


def state_rows(config: RunConfig, plan: Plan, model: ModelConfig, weights: RankWeights) -> Iterator[MemoryRow]:
    """Rows for what a rank holds all the time."""
    width, stage = WEIGHT_BYTES[plan.precision], plan.zero_stage
    home: Place = "host" if plan.device == "cpu" else "gpu"
    trained = [kind for kind in weights.kinds if is_trained(config, model, kind)]
    whole, share = sum(kind.numel for kind in trained), sum(kind.sharded for kind in trained)
    is_partitioned = stage >= STAGE_WITH_PARTITIONED_WEIGHTS
    held = sum(kind.sharded for kind in weights.kinds) if is_partitioned else weights.numel
    yield MemoryRow("weights", _place(plan.offload_param, home), width * held, _lowers(stage, 3))
    gradients = share if stage >= 2 else whole
    yield MemoryRow("gradients", _place(plan.offload_optimizer, home), width * gradients, _lowers(stage, 2))
    updated, optimizer = share if stage else whole, _place(plan.offload_optimizer, home)
    yield MemoryRow("fp32 weights", optimizer, _WIDE * updated, _lowers(stage, 1))
    moments = _WIDE * MOMENTS[plan.optimizer.name] * updated
    yield MemoryRow("moments", optimizer, moments, _lowers(stage, 1))


def _place(offload: str, home: Place) -> Place:
    return {"none": home, "cpu": "host", "nvme": "nvme"}[offload]  # type: ignore[return-value]


def _lowers(stage: int, needed: int) -> str:
    """The option that lowers what is divided from ZeRO stage `needed` on."""
    return _STAGE if stage < needed else "parallel.tp"
