"""Activations of a rank: of its layers, and of the head and the loss."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ds_finetune.config.sections import OWN_ATTENTIONS, LoraConfig
from ds_finetune.families.family import layer_of
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.families.tensors import EMBEDDING, model_tensors
from ds_finetune.plan.combinations import WEIGHT_BYTES
from ds_finetune.plan.estimate.activation_memory import ActivationBytes, AdaptedLayers, activation_bytes
from ds_finetune.plan.estimate.config_text import config_text
from ds_finetune.plan.estimate.head_rows import head_rows
from ds_finetune.plan.estimate.rank_weights import RankWeights
from ds_finetune.plan.estimate.rows import FORWARD, KEPT_FOR_BACKWARD, MemoryRow, Place
from ds_finetune.plan.lora_targets import adapted_targets, targets_among
from ds_finetune.plan.packed_attention import varlen_problem
from ds_finetune.plan.pipeline import num_held_forwards
from ds_finetune.plan.plan import Plan

_MICRO_BATCH = "train.micro_batch_size"
_LENGTH = "train.max_seq_len"
EXPERT_IMBALANCE = 1.25
"""Rows that the experts of a rank get over their mean, where `parallel.ep` ranks divide the experts: assumed."""


def activation_rows(
    plan: Plan, model: ModelConfig, stages: tuple[RankWeights, ...], number: int
) -> Iterator[MemoryRow]:
    """Rows for the activations of a rank of pipeline stage `number`. All tokens of its rows are counted as supervised,
    and rows as full.
    """
    home: Place = "host" if plan.device == "cpu" else "gpu"
    own = stage_activations(plan, model, stages[number])
    tokens = tokens_of_rank(plan)
    flying = in_flight(plan, number)
    yield from _layer_rows(plan, own, tokens, flying=flying)
    if plan.mesh.pp > 1:
        # What each held forward gave, and one gradient.
        between = int(own.layer_input * tokens * (flying * plan.parallel.vpp + 1))
        yield MemoryRow("hidden states between stages", home, between, _MICRO_BATCH, KEPT_FOR_BACKWARD)
    if number == plan.mesh.pp - 1:
        yield from head_rows(plan, own, tokens)
    if number == 0 and plan.lora is None:
        (size,) = (kind.numel for kind in stages[0].kinds if kind.name == EMBEDDING)
        gradient = WEIGHT_BYTES[plan.precision] * size + 2 * own.layer_input * tokens
        yield MemoryRow("gradient of the embedding", home, gradient, "parallel.tp", ("embedding",))
    yield from _exchange_rows(plan, model, own, tokens)


def tokens_of_rank(plan: Plan) -> int:
    """Tokens of a micro-batch that a rank has."""
    return plan.batch.micro_batch_size * -(-plan.batch.max_seq_len // plan.mesh.sp)


def in_flight(plan: Plan, stage: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at a time; with `parallel.vpp` forwards run a part of its
    layers.
    """
    vpp, accumulation = plan.parallel.vpp, plan.batch.gradient_accumulation_steps
    return num_held_forwards(pp=plan.mesh.pp, vpp=vpp, micro_batches=accumulation, rank=stage) / vpp


def stage_activations(plan: Plan, model: ModelConfig, weights: RankWeights) -> ActivationBytes:
    """The activations of the layers of a pipeline stage."""
    text = config_text(model)
    lora = plan.lora.model_dump_json() if plan.lora is not None else ""
    sizes, is_packed = (plan.mesh.tp, plan.mesh.ep, 1 if plan.mtp.train else 0), _packs_documents(plan, model)
    return _of_stage(text, plan.precision, sizes, lora, weights.layers, is_packed=is_packed, device=plan.device)


def model_activations(plan: Plan, model: ModelConfig) -> ActivationBytes:
    """The activations of a whole `model` that a rank runs beside that of the run, in its precision."""
    text, is_packed = config_text(model), _packs_documents(plan, model)
    return _activations(text, plan.precision, (1, 1, 0), "", is_packed=is_packed, device=plan.device)


def _packs_documents(plan: Plan, model: ModelConfig) -> bool:
    """Whether attention to all documents of a forward is one call."""
    return (
        plan.device == "cuda"
        and plan.attention in OWN_ATTENTIONS
        and plan.attention != "by_document"
        and not varlen_problem(model, precision=plan.precision)
    )


def _layer_rows(plan: Plan, own: ActivationBytes, tokens: int, *, flying: float) -> Iterator[MemoryRow]:
    home: Place = "host" if plan.device == "cpu" else "gpu"
    is_tiled = plan.tiled_mlp
    if not plan.activation_checkpointing:
        kept = own.kept_by_layers(is_tiled=is_tiled) * tokens
        yield MemoryRow(
            "activations of layers",
            home,
            int(kept * flying),
            "train.activation_checkpointing",
            (*FORWARD, "head backward"),
        )
        most = own.kept_at_most(tokens, is_tiled=is_tiled) + int(kept * max(flying - 1, 0))
        yield MemoryRow("activations and their gradients", home, most, "train.activation_checkpointing", ("layers",))
        return
    inputs = int(own.inputs() * tokens * flying)
    if plan.activation_offload:
        yield MemoryRow("inputs of recomputed layers, offloaded", "host", inputs, _MICRO_BATCH)
        inputs = own.inputs_on_device() * tokens
    option = _MICRO_BATCH if plan.activation_offload or plan.device == "cpu" else "train.activation_offload"
    yield MemoryRow("inputs of recomputed layers", home, inputs, option, KEPT_FOR_BACKWARD)
    forward = max(layer.forward for layer in own.kinds) * tokens
    yield MemoryRow("one layer in forward", home, forward, _MICRO_BATCH, ("forward",))
    working = own.working_set(tokens, is_tiled=is_tiled)
    # Tiles sum the gradients of a layer's weights in fp32, which may be more than they save.
    in_tiles = own.working_set(tokens, is_tiled=True)
    option = "train.tiled_mlp" if in_tiles < working else _MICRO_BATCH
    yield MemoryRow("one layer in backward", home, working, option, ("layers",))


def _exchange_rows(plan: Plan, model: ModelConfig, own: ActivationBytes, tokens: int) -> Iterator[MemoryRow]:
    home: Place = "host" if plan.device == "cpu" else "gpu"
    width = WEIGHT_BYTES[plan.precision]
    if plan.mesh.sp > 1:
        heads = model["num_attention_heads"] // plan.mesh.tp
        head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        if model.get("kv_lora_rank") is not None:
            head_dim = model["qk_nope_head_dim"] + model["qk_rope_head_dim"]
        # What is sent and what arrives, of one tensor at a time.
        size = 2 * width * heads * head_dim * tokens
        yield MemoryRow("exchange of sequence parallelism", home, size, _LENGTH, ("forward", "layers"))
    if plan.mesh.ep > 1:
        sparse = next((layer for layer in own.layers if layer.router), None)
        assert plan.parallel.ep == plan.mesh.ep
        if sparse is not None:
            rows = own.layer_input * _chosen(model) * tokens
            # Rows that leave and arrive, and what their experts get beyond the mean.
            size = int(2 * rows * EXPERT_IMBALANCE + (EXPERT_IMBALANCE - 1) * sparse.mlp * tokens)
            yield MemoryRow("exchange of expert parallelism", home, size, _LENGTH, ("forward", "layers"))


def _chosen(model: ModelConfig) -> int:
    return int(model.get("num_experts_per_tok") or 1)


@lru_cache(maxsize=4096)
def _of_stage(  # noqa: PLR0913 - those of activation_bytes
    model: str,
    precision: str,
    sizes: tuple[int, int, int],
    lora: str,
    layers: tuple[int, ...],
    *,
    is_packed: bool,
    device: str,
) -> ActivationBytes:
    """Of some layers, on a rank of `sizes` tp, ep and prediction layers."""
    each = _activations(model, precision, sizes, lora, is_packed=is_packed, device=device)
    # A prediction layer is like the last layer.
    return replace(each, layers=tuple(each.layers[min(layer, len(each.layers) - 1)] for layer in layers))


@lru_cache(maxsize=1024)
def _activations(  # noqa: PLR0913 - those of activation_bytes
    model: str, precision: str, sizes: tuple[int, int, int], lora: str, *, is_packed: bool, device: str
) -> ActivationBytes:
    tree, (tp, ep, mtp_layers) = json.loads(model), sizes
    adapters = _adapters(tree, LoraConfig.model_validate_json(lora), mtp_layers) if lora else None
    return activation_bytes(
        tree, precision=precision, tp=tp, ep=ep, is_packed=is_packed, device=device, adapters=adapters
    )


def _adapters(model: ModelConfig, lora: LoraConfig, mtp_layers: int) -> AdaptedLayers:
    targets = adapted_targets(targets_among(model_tensors(model, mtp_layers=mtp_layers).named()), lora)
    names = [set[str]() for _ in range(model["num_hidden_layers"])]
    for target in targets:
        number = layer_of(f"{target.name}.")
        if 0 <= number < len(names):
            names[number].add(target.name.split(f".{number}.", 1)[1])
    return AdaptedLayers(lora.rank, tuple(map(frozenset, names)))
