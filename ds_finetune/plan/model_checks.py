"""Table of settings that are refused because of the model's config.json. `plan/checks.py` has the other refusals."""

import math
from collections.abc import Iterator

from ds_finetune.config.objectives import is_grpo
from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import ModelError
from ds_finetune.families.layer_rules import hashed_layers, indexed_layers, longest_window
from ds_finetune.families.table import FAMILIES, FULLY_TESTED, WITH_CONTEXT
from ds_finetune.plan.batch import divisors
from ds_finetune.plan.forward import problem_of_calls, varlen_problem
from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.plan.precision import ROW_BYTES, WEIGHT_BYTES, wider
from ds_finetune.plan.rollout_checks import ROLLOUT_MODEL
from ds_finetune.plan.settings import UNTESTED_TRAINING, Conflict, MessageFields, ModelSettings, Refusal, setting

_MOST_RANKS_OF_AXIS = 4096
"""Largest size of a parallel axis (`tp`, `sp`, ...) that the hint of an error proposes."""


def _untested_type(model: ModelSettings) -> MessageFields:
    tested = next((row.families for row in TESTED_LAYOUTS if row.axes == model.run.axes), ())
    return {"tested": ", ".join(tested)} if model.run.axes and model.model_type not in tested else None


def _chunk_values(model: ModelSettings) -> dict[str, int]:
    layers, pp = int(model.config["num_hidden_layers"]), model.run.mesh.pp
    return {"layers": layers, "chunks": pp * model.run.parallel.vpp, "legal": layers // pp}


def _wrong_shares(model: ModelSettings) -> MessageFields:
    given, pp, vpp = model.run.parallel.pp_layers, model.run.mesh.pp, model.run.parallel.vpp
    values = _chunk_values(model)
    if len(given) == values["chunks"] and sum(given) == values["layers"] and min(given) >= 1:
        return None
    return {**values, "given": list(given), "parts": f"{pp} stages" if vpp == 1 else f"{pp} x {vpp} chunks"}


def _rotary_type(model: ModelSettings) -> object:
    scaling = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    return scaling.get("rope_type", scaling.get("type"))


def _in_each_rank(key: str) -> Refusal[ModelSettings]:
    return Refusal(
        lambda model: model.run.mesh.tp > 1 and (value := model.config.get(key)) and {"value": str(value).lower()},
        f"parallel {{run.mesh}} of a model with {key} {{value}} is not tested",
        "set parallel.tp: 1",
    )


def _undivided(model: ModelSettings) -> MessageFields:
    for axis, what, number in _divided_dimensions(model) if model.run.axes else ():
        size = getattr(model.run.mesh, axis)
        if number % size:
            legal = ", ".join(map(str, divisors(number, most=_MOST_RANKS_OF_AXIS)))
            return {"axis": axis, "size": size, "number": number, "what": what, "legal": legal}
    return None


def _divided_dimensions(model: ModelSettings) -> Iterator[tuple[str, str, int]]:
    """Dimensions of the model that parallel axes divide: the axis, the name of the dimension, and its size."""
    config, tp, keys = model.config, model.run.mesh.tp, model.family.expert_keys
    heads = int(config["num_attention_heads"])
    yield "tp", "attention heads", heads
    if model.family.compresses:
        yield "tp", "groups of outputs", int(config["o_groups"])
    else:
        yield "sp", f"attention heads{' of a tensor parallel rank' if tp > 1 else ''}", heads // tp
        yield "tp", "key and value heads", int(config.get("num_key_value_heads") or heads)
    if keys is None or (keys.width_key != "intermediate_size" and "intermediate_size" in config):
        yield "tp", "columns of the MLP", int(config["intermediate_size"])
    if keys is not None:
        yield "tp", "columns of an expert", keys.width(config)
    yield "tp", "tokens of the vocabulary", int(config["vocab_size"])
    if keys is not None:
        yield "ep", "routed experts", keys.number(config)


_SIZES: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        lambda model: (
            model.run.mesh.pp == 1 and model.run.parallel.pp_layers and {"given": list(model.run.parallel.pp_layers)}
        ),
        "parallel.pp_layers {given} with parallel.pp 1, which has no pipeline stages",
        "set parallel.pp, or leave parallel.pp_layers out",
    ),
    Refusal(_untested_type, "parallel {run.mesh} of model_type {model_type} is not tested", "use one of {tested}"),
    Refusal(
        lambda model: model.run.axes and model.run.mesh.pp > (values := _chunk_values(model))["layers"] and values,
        "parallel.pp {run.mesh.pp} is more than the {layers} layers of the model",
        "set parallel.pp to at most {layers}",
    ),
    Refusal(
        lambda model: model.run.axes and (values := _chunk_values(model))["chunks"] > values["layers"] and values,
        "parallel.pp {run.mesh.pp} x parallel.vpp {run.parallel.vpp} = {chunks} chunks are more than the {layers} "
        "layers of the model",
        "set parallel.vpp to at most {legal}",
    ),
    Refusal(
        lambda model: model.run.parallel.pp_layers and _wrong_shares(model),
        "parallel.pp_layers {given} does not divide {layers} layers over {parts}",
        "name {chunks} numbers of at least 1 whose sum is {layers}, or leave parallel.pp_layers out",
    ),
    # transformers 5.23 selects scaling factors by the positions in a call (modeling_rope_utils.py:47), and each rank's
    # call has only a part of the positions.
    Refusal(
        lambda model: model.run.mesh.sp > 1 and _rotary_type(model) == "longrope",
        "parallel {run.mesh} of a model with rope_type longrope is not tested",
        "set parallel.sp: 1",
    ),
    # Outputs of shared experts are summed over tensor parallel ranks, so their bias would be added once per rank.
    # Router noise would differ between these ranks.
    _in_each_rank("mlp_bias"),
    _in_each_rank("router_jitter_noise"),
    Refusal(
        _undivided,
        "parallel.{axis} {size} does not divide the {number} {what} of the model",
        "set parallel.{axis} to one of {legal}",
    ),
)


def _unaligned_width(model: ModelSettings) -> MessageFields:
    keys, tp, size = model.family.expert_keys, model.run.mesh.tp, WEIGHT_BYTES[model.run.precision]
    width = keys.width(model.config) if keys is not None else 0
    if keys is None or width // tp * size % ROW_BYTES == 0:
        return None
    legal = [str(n) for n in range(1, tp) if width % n == 0 and width // n * size % ROW_BYTES == 0]
    hint = f"set parallel.tp to {' or '.join(legal)}" if legal else wider(model.run.precision)
    return {"key": keys.width_key, "width": width, "columns": width // tp, "bytes": size, "legal": hint}


def _unaligned_hidden(model: ModelSettings) -> MessageFields:
    size = WEIGHT_BYTES[model.run.precision]
    is_refused = model.family.expert_keys is not None and int(model.config["hidden_size"]) * size % ROW_BYTES
    return {"bytes": size, "legal": wider(model.run.precision)} if is_refused else None


_EXPERTS: tuple[Refusal[ModelSettings], ...] = (
    # torch 2.13 requires each row of the experts' matrices to be a multiple of 16 bytes ("strides should be multiple of
    # 16 bytes").
    Refusal(
        _unaligned_width,
        "{key} {width} / parallel.tp {run.mesh.tp} = {columns} columns of an expert x {bytes} bytes in {run.precision} "
        f"is no multiple of {ROW_BYTES} bytes, which torch's grouped product needs",
        "{legal}",
    ),
    Refusal(
        _unaligned_hidden,
        "hidden_size {config[hidden_size]} x {bytes} bytes in {run.precision} is no multiple of "
        f"{ROW_BYTES} bytes, which torch's grouped product of experts needs",
        "{legal}",
    ),
    # The biases of a layer's experts form one matrix, and DeepSpeed 0.19.8's Muon takes every tensor of two or more
    # dimensions (__init__.py:369).
    Refusal(
        lambda model: model.run.optimizer == "muon" and model.family.transposed_experts,
        "optim.name {run.optim.name} of model_type {model_type} would orthogonalise the biases of its experts",
        "set optim.name: AdamW",
    ),
    Refusal(
        lambda model: model.family.has_state and (model.run.optimizer == "muon" or "zenflow" in model.run.inexact),
        "optim.name Muon or zero_optimization.zenflow cannot work with convolutions, which model_type {model_type} "
        "has: they know only matrices and vectors",
        "set optim.name: AdamW, without zenflow",
    ),
    # DeepSpeed 0.19.8 treats 3-dimensional tensors as vectors (zenflow/zenflow_stage_1_and_2.py:216): ZenFlow would
    # select and update the wrong elements.
    Refusal(
        lambda model: "zenflow" in model.run.inexact and model.family.expert_keys is not None,
        "zero_optimization.zenflow cannot work with experts, which model_type {model_type} has: it knows only "
        "matrices and vectors",
        "train a dense model, or leave zenflow out",
    ),
)


def _untested_switch(key: str) -> Refusal[ModelSettings]:
    return Refusal(
        lambda model: getattr(model.run.train, key) and model.model_type not in FULLY_TESTED,
        f"train.{key} true of model_type {{model_type}} is not tested",
        f"leave train.{key} out, or use one of {', '.join(FULLY_TESTED)}",
    )


def _odd_columns(model: ModelSettings) -> MessageFields:
    graph, keys = model.family.onnx, ("qk_nope_head_dim", "qk_rope_head_dim")
    numbers = [int(model.config.get(key) or 0) for key in keys]
    is_odd = graph is not None and graph.is_rotary_interleaved and sum(numbers) % 2
    return {"sum": " + ".join(f"{key} {n}" for key, n in zip(keys, numbers, strict=True))} if is_odd else None


def _given_router(model: ModelSettings) -> MessageFields:
    if model.run.router is None:
        return None
    given = ", ".join(f"{name} {getattr(model.run.router, name)}" for name in model.run.router.model_fields_set)
    what = "has no routed experts" if model.model_type in FAMILIES else "is not in the table of model families"
    return {"given": given or "empty", "what": what, "legal": _types_with("router")}


def _types_with(part: str) -> str:
    return ", ".join(name for name, family in FAMILIES.items() if getattr(family, part))


def _without_bias(model: ModelSettings) -> MessageFields:
    given, router = model.run.router, model.family.router
    if given is None or not given.bias_update or router is None or router.bias:
        return None
    return {"legal": ", ".join(name for name, row in FAMILIES.items() if row.router is not None and row.router.bias)}


_TYPE: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        lambda model: (
            model.run.lora is not None
            and not (model.family.has_lora or model.family.is_generic)
            and {"tested": f"{_types_with('has_lora')}, and types without a row in the table of families"}
        ),
        "lora of model_type {model_type} is not tested",
        "use one of {tested}",
    ),
    # An odd number of rotary columns makes torch fail in the first step (transformers 5.23,
    # deepseek_v2/modeling_deepseek_v2.py:264).
    Refusal(
        _odd_columns,
        "{sum} in config.json is an odd number of columns, but rotary embeddings rotate pairs of columns",
        "use the config.json published with the model",
        ModelError,
    ),
    Refusal(
        lambda model: model.family.router is None and _given_router(model),
        "`router` ({given}) with model_type {model_type}, which {what}",
        "leave `router` out; it is for {legal}",
    ),
    Refusal(
        lambda model: model.run.lora is not None and _given_router(model),
        "`router` ({given}) with lora.rank {run.lora.rank}: adapters leave routers as they are",
        "leave `router` out, or train all weights; lora.target_modules adapts routers where it names `gate`",
    ),
    Refusal(
        _without_bias,
        "router.bias_update {run.router.bias_update:g} with model_type {model_type}, whose routers have no bias",
        "set router.balance instead; routers of {legal} have a bias",
    ),
    Refusal(
        lambda model: model.run.router is not None and model.run.router.balance and not model.run.router.train,
        "router.balance {run.router.balance:g} with router.train false: the loss could not change the routers",
        "set router.train: true, or router.balance: 0",
    ),
    Refusal(
        lambda model: model.run.indexer.train and model.family.indexer is None and {"legal": _types_with("indexer")},
        "indexer.train true with model_type {model_type}, whose attention has no indexer",
        "leave indexer out; it is for {legal}",
    ),
)


def _without_entries(model: ModelSettings) -> MessageFields:
    window = longest_window(model.config) if model.family.compresses else 0
    return {"window": window} if model.run.train.max_seq_len < window else None


def _without_balance(model: ModelSettings) -> MessageFields:
    if model.run.router is None or not (model.run.router.balance or model.run.router.bias_update):
        return None
    reads_ids = model.family.router is not None and model.family.router.reads_ids
    is_all_by_id = reads_ids and len(hashed_layers(model.config)) == model.config["num_hidden_layers"]
    return _given_router(model) if is_all_by_id else None


def _untested_with_entries(conflict: Conflict) -> Refusal[ModelSettings]:
    return Refusal(
        lambda model: model.family.compresses and conflict.applies(model.run),
        f"model_type {{model_type}} with {conflict.text.replace('{', '{run.')} is not tested",
        conflict.hint,
    )


_COMPRESSED: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        _without_entries,
        "train.max_seq_len {run.train.max_seq_len} with a model whose layers compress up to {window} tokens into an "
        "entry: shorter rows have no entry, and weight decay would shrink weights that get no gradient",
        "set train.max_seq_len to at least {window}",
    ),
    *map(
        _untested_with_entries,
        (
            *UNTESTED_TRAINING,
            Conflict(
                "objective {objective.name}",
                "set objective to sft or dpo: the cache of sampled answers has no place for compressed entries",
                lambda run: is_grpo(run.objective),
            ),
            setting("model.resize_vocabulary true", "use a tokenizer that fits the model: new ids have no experts"),
            Conflict(
                "lora and mtp.train true", "leave lora or mtp out", lambda run: run.lora is not None and run.mtp.train
            ),
        ),
    ),
    Refusal(
        _without_balance,
        "`router` ({given}) with a model whose routers all choose experts by token ids: there is nothing to balance",
        "leave router.balance and router.bias_update out",
    ),
)


def _blind_to_sinks(model: ModelSettings) -> MessageFields:
    if not (model.family.has_sinks or model.family.has_state) or model.run.model.attention in OWN_ATTENTIONS:
        return None
    is_flash = model.run.model.attention == "flash_attention_2" and model.family.has_sinks
    return {
        "what": "attention has sinks" if model.family.has_sinks else "layers have a state",
        "why": "its kernels have none" if is_flash else "documents of a packed row would see each other",
    }


def _unfit_for_varlen(model: ModelSettings) -> MessageFields:
    if model.run.model.attention != "varlen":
        return None
    problem = varlen_problem(model.config, precision=model.run.precision)
    problem = problem or problem_of_calls(model.config, model.run.train.max_seq_len)
    return {"problem": problem} if problem else None


_KERNEL: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        _blind_to_sinks,
        "model.attention {run.model.attention} with model_type `{model_type}`, whose {what}: {why}",
        "set model.attention: sdpa",
        ModelError,
    ),
    Refusal(
        _unfit_for_varlen,
        "model.attention varlen with model_type `{model_type}`: {problem}",
        "set model.attention: sdpa, which attends document by document there",
        ModelError,
    ),
    Refusal(
        lambda model: model.run.model.kernels in ("liger", "compile") and not model.family.fused,
        "model.kernels {run.model.kernels} with model_type `{model_type}` would replace no operation, or is not tested",
        "set model.kernels: auto",
        ModelError,
    ),
)


def _beyond_positions(model: ModelSettings) -> MessageFields:
    if not model.positions or model.run.train.max_seq_len <= model.positions:
        return None
    return {"extend": ", or extend the model by model.context" if model.model_type in WITH_CONTEXT else ""}


_POSITIONS: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        lambda model: model.run.model.context is not None and model.run.train.max_seq_len > model.run.model.context,
        "train.max_seq_len {run.train.max_seq_len} is more than model.context {run.model.context}",
        "set train.max_seq_len to {run.model.context} or less, or a larger model.context",
    ),
    Refusal(
        _beyond_positions,
        "train.max_seq_len {run.train.max_seq_len} is more than the {positions} positions of {run.model.path}",
        "set train.max_seq_len to {positions} or less{extend}",
    ),
)


def _unshared_teacher(model: ModelSettings) -> MessageFields:
    heads = int(model.config.get("num_attention_heads") or 1)
    is_refused = model.run.mesh.sp > 1 and ("sp" not in model.family.parallel_axes or heads % model.run.mesh.sp)
    return {"heads": heads} if is_refused else None


_TEACHER: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        lambda model: model.run.train.max_seq_len > (model.config.get("max_position_embeddings") or math.inf),
        "train.max_seq_len {run.train.max_seq_len} is more than the {config[max_position_embeddings]} positions of the "
        "teacher {run.objective.teacher}",
        "set train.max_seq_len to {config[max_position_embeddings]} or less",
    ),
    Refusal(
        _unshared_teacher,
        "parallel {run.mesh} with the teacher {run.objective.teacher} of model_type {model_type} and {heads} attention "
        "heads is not tested",
        "set parallel.sp: 1",
    ),
)


def _first_without_indexer(model: ModelSettings) -> MessageFields:
    with_indexer = indexed_layers(model.config)
    for stage, layers in enumerate(model.stages):
        for chunk in layers.chunks if layers is not None else ():
            if chunk[0] not in with_indexer and chunk[0] < model.config["num_hidden_layers"]:
                return {"stage": stage, "layer": chunk[0], "legal": ", ".join(map(str, with_indexer))}
    return None


def _trains_embedding_twice(model: ModelSettings) -> bool:
    is_tied = bool(model.config.get("tie_word_embeddings")) and model.run.objective.row.head != "scores"
    return model.run.parallel.pp > 1 and model.run.lora is None and (model.run.mtp.train or is_tied)


_STAGES: tuple[Refusal[ModelSettings], ...] = (
    # Hosts of the first pipeline stage save the embedding's optimizer state. If each host has a folder of its own,
    # hosts of the last stage could not read that state.
    Refusal(
        lambda model: model.run.checkpoint.node_local and _trains_embedding_twice(model),
        "checkpoint.node_local true with parallel.pp {run.parallel.pp} of a model whose first and last stage both hold "
        "the embedding is not tested",
        "save to a folder that all hosts share",
    ),
    # A layer without an indexer attends to the tokens that the preceding layer's indexer chose.
    Refusal(
        lambda model: model.run.indexer.train and not model.family.compresses and _first_without_indexer(model),
        "indexer.train true with parallel.pp {run.parallel.pp}: stage {stage} begins with layer {layer}, which has no "
        "indexer",
        "let stages begin with one of layers {legal} by parallel.pp_layers",
    ),
)


def _may_choose(model: ModelSettings) -> bool:
    """Whether layers share an indexer, and documents may have more tokens than it chooses."""
    chosen = model.config.get("index_topk")
    is_shared = model.family.indexer is not None and model.family.indexer.is_shared
    return bool(is_shared and chosen and model.run.train.max_seq_len > chosen)


_DOCUMENTS: tuple[Refusal[ModelSettings], ...] = (
    # A search does not know the lengths of documents, so it takes train.max_seq_len as the longest one. `train` itself
    # checks each document.
    Refusal(
        lambda model: _may_choose(model) and _first_without_indexer(model),
        "train.max_seq_len {run.train.max_seq_len} is more than index_topk {config[index_topk]}, and a stage of "
        "parallel.pp {run.parallel.pp} begins with layer {layer}, which has no indexer",
        "set train.max_seq_len: {config[index_topk]}, or parallel.pp: 1",
    ),
)

WITH_MESH: dict[str, tuple[Refusal[ModelSettings], ...]] = {
    "sizes of the model": _SIZES,
    "experts of the model": _EXPERTS,
}
WITHOUT_MESH: dict[str, tuple[Refusal[ModelSettings], ...]] = {
    "activations of the model": (_untested_switch("activation_offload"), _untested_switch("tiled_mlp")),
    "type of the model": (*_TYPE, *_COMPRESSED),
    "sampled answers of the model": ROLLOUT_MODEL,
    "attention of the model": _KERNEL,
}
"""Refused settings that depend on config.json: `WITH_MESH` also depends on the parallel layout, `WITHOUT_MESH` does
not.
"""
MODEL_CHECKS: dict[str, tuple[Refusal[ModelSettings], ...]] = {
    **WITH_MESH,
    **WITHOUT_MESH,
    "positions": _POSITIONS,
    "teacher": _TEACHER,
    "stages": _STAGES,
    "length of documents": _DOCUMENTS,
}
"""Refused settings that need the model's config.json, by subject."""


def check_model(model: ModelSettings, *subjects: str) -> None:
    """Raise the ConfigError or ModelError of the first refused setting of these subjects, which are keys of
    `MODEL_CHECKS`.
    """
    for subject in subjects:
        for row in MODEL_CHECKS[subject]:
            row.raise_for(model)
