"""Activations of a rank: of its layers, and of the head and the loss."""

import json
from collections.abc import Iterator
from functools import lru_cache

from ds_finetune.config.schema import RunConfig
from ds_finetune.estimate.activation_memory import ActivationBytes, activation_bytes
from ds_finetune.estimate.rank_weights import RankWeights
from ds_finetune.estimate.rows import MemoryRow, Place
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.pipeline import num_held_forwards
from ds_finetune.plan.plan import Plan

_MICRO_BATCH = "train.micro_batch_size"


def activation_rows(
    config: RunConfig, plan: Plan, model: ModelConfig, stages: tuple[RankWeights, ...], number: int
) -> Iterator[MemoryRow]:
    """Rows for the activations of a rank of pipeline stage `number`."""
    home: Place = "host" if plan.device == "cpu" else "gpu"
    batch = plan.batch
    tokens = batch.micro_batch_size * -(-batch.max_seq_len // plan.mesh.sp)
    vpp, accumulation = config.parallel.vpp, batch.gradient_accumulation_steps
    forwards = num_held_forwards(pp=len(stages), vpp=vpp, micro_batches=accumulation, rank=number)
    each = _activations(json.dumps(model, sort_keys=True, default=str), plan.precision, plan.mesh.tp)
    layers = [each.layers[layer] for layer in stages[number].layers if layer < len(each.layers)]
    # A forward of the schedule runs one of the rank's chunks.
    inputs = each.layer_input * len(layers) * tokens * forwards // vpp
    if plan.activation_checkpointing:
        yield MemoryRow("inputs of recomputed layers", home, inputs, _MICRO_BATCH)
        own = ActivationBytes(each.layer_input, tuple(layers), each.tiles, each.head)
        working = own.working_set(is_tiled=config.train.tiled_mlp) * tokens
        yield MemoryRow("a recomputed layer", home, working, "train.tiled_mlp", "layers")
    else:
        kept = inputs + sum(layer.kept for layer in layers) * tokens * forwards // vpp
        yield MemoryRow("activations of layers", home, kept, "train.activation_checkpointing")
        gradients = max(layer.mlp_gradients for layer in layers) * tokens
        yield MemoryRow("gradients of activations", home, gradients, _MICRO_BATCH, "layers")


@lru_cache(maxsize=256)
def _activations(model: str, precision: str, tp: int) -> ActivationBytes:
    return activation_bytes(json.loads(model), precision=precision, tp=tp)
