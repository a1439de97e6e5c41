"""What `train` checks of a model's config.json against the layout of a run, without building the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import CheckpointConfig, TrainConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.parameters import indexed_layers
from ds_finetune.families.table import FAMILIES, WITH_TINY_MODELS, family_of
from ds_finetune.plan.activations import check_model_type
from ds_finetune.plan.combinations import check_divides, check_expert_widths, check_optimizer
from ds_finetune.plan.indexer import check_stages_begin_with_indexers, plan_indexer
from ds_finetune.plan.inexact import check_inexact_model
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.packed_attention import check_sinks, check_varlen


def check_model(config: RunConfig, mesh: Mesh, model: Mapping[str, Any]) -> None:
    """ConfigError where the sizes, the optimizer or the inexact options of a run do not fit the model with this
    config.json.
    """
    check_divides(mesh, model, pp_layers=config.parallel.pp_layers, vpp=config.parallel.vpp)
    check_expert_widths(mesh, model, precision=config.train.precision)
    check_optimizer(config.optim.name, model)
    check_inexact_model(config.inexact, model)


def check_settings(config: RunConfig, model: Mapping[str, Any]) -> None:
    """ConfigError or ModelError where settings of the run that do not depend on its ranks do not fit the model."""
    check_model_type(config.train, model)
    if config.lora is not None:
        check_lora_type(str(model.get("model_type")))
    check_attention_kernel(config.model.attention, config.train, model)
    _check_complex_heads(model)


def _check_complex_heads(model: Mapping[str, Any]) -> None:
    """ModelError where pairs of columns are read as complex numbers and heads have an odd number of columns, at which
    torch fails in the first step (transformers 5.23, deepseek_v2/modeling_deepseek_v2.py:264).
    """
    graph, sizes = family_of(str(model.get("model_type"))).onnx, ("qk_nope_head_dim", "qk_rope_head_dim")
    numbers = [int(model.get(size) or 0) for size in sizes]
    if graph is not None and graph.is_rotary_interleaved and sum(numbers) % 2:
        shown = " + ".join(f"{size} {number}" for size, number in zip(sizes, numbers, strict=True))
        raise ModelError(
            f"{shown} of the model make an odd number of columns", hint="take the config.json published with the model"
        )


def check_attention_kernel(attention: str, train: TrainConfig, model: Mapping[str, Any]) -> None:
    """ModelError where the attention of the run file cannot compute a model, or that of a teacher."""
    check_sinks(attention, model)
    check_varlen(attention, model, precision=train.precision, longest=train.max_seq_len)


def check_lora_type(model_type: str) -> None:
    """ConfigError where LoRA is not tested with a model type."""
    if not family_of(model_type).has_lora:
        tested = ", ".join(name for name, family in FAMILIES.items() if family.has_lora)
        raise ConfigError(f"lora of model_type {model_type} is not tested", hint=f"tested: {tested}")


def check_model_stages(config: RunConfig, model: Mapping[str, Any], stages: Sequence[StageLayers | None]) -> None:
    """ConfigError where the layers of pipeline stages do not fit what is trained of the model."""
    is_tied = bool(model.get("tie_word_embeddings")) and config.objective.row.head != "scores"
    if config.lora is None and (config.mtp.train or is_tied):
        _check_folder_of_ends(config.parallel.pp, config.checkpoint)
    indexer = plan_indexer(config, model)
    if indexer is not None:
        check_stages_begin_with_indexers(indexer, stages)


def check_unknown_lengths(config: RunConfig, model: Mapping[str, Any], stages: Sequence[StageLayers | None]) -> None:
    """ConfigError where a stage would attend to tokens that the layer before it chooses, if a document is longer than
    `index_topk`. The documents are not known before the data is read; `train` looks at each.
    """
    indexer, chosen = family_of(str(model.get("model_type"))).indexer, model.get("index_topk")
    if indexer is None or not indexer.is_shared or not chosen or config.train.max_seq_len <= chosen:
        return
    with_indexer = indexed_layers(model)
    for first in (chunk[0] for layers in stages if layers is not None for chunk in layers.chunks):
        if first < model["num_hidden_layers"] and first not in with_indexer:
            raise ConfigError(
                f"train.max_seq_len {config.train.max_seq_len} is more than index_topk {chosen}, and a stage of "
                f"parallel.pp {config.parallel.pp} begins with layer {first}, which has no indexer",
                hint=f"set train.max_seq_len: {chosen}, or parallel.pp: 1",
            )


def check_positions(config: RunConfig, model_type: str, allowed: int | None) -> None:
    """ConfigError where rows are longer than `model.context` says, or than the `allowed` positions of the model."""
    tokens, context = config.train.max_seq_len, config.model.context
    if context is not None and tokens > context:
        raise ConfigError(
            f"train.max_seq_len {tokens} is more than model.context {context}",
            hint=f"set train.max_seq_len to {context} or less, or a larger model.context",
        )
    if allowed and tokens > allowed:
        extend = ", or extend the model by model.context" if model_type in WITH_TINY_MODELS else ""
        raise ConfigError(
            f"train.max_seq_len {tokens} is more than the {allowed} positions of {config.model.path}",
            hint=f"set train.max_seq_len to {allowed} or less{extend}",
        )


def max_positions(model: Mapping[str, Any]) -> int | None:
    """Maximum number of tokens of a document, from config.json; None where it names none."""
    positions, encoder = model.get("max_position_embeddings"), family_of(str(model.get("model_type"))).encoder
    if not positions:
        return None
    # Positions of RoBERTa begin behind that of padding (transformers 5.23, roberta/modeling_roberta.py:142-156).
    first = int(model.get("pad_token_id") or 0) + 1 if encoder is not None and encoder.positions_follow_padding else 0
    return int(positions) - first


def _check_folder_of_ends(pp: int, checkpoint: CheckpointConfig) -> None:
    """ConfigError where the last stage of a pipeline holds the embedding too, and would look for its state in a folder
    that only the ranks of the first stage may see.
    """
    if pp > 1 and checkpoint.node_local:
        raise ConfigError(
            f"checkpoint.node_local true with parallel.pp {pp} of a model whose first and last stage "
            "both hold the embedding is not tested",
            hint="save to a folder that all hosts share",
        )
