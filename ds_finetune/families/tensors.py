"""Names and shapes of a model's parameters, computed from its config.json as transformers 5.23 builds them.

tests/plan/estimate/test_rank_weights.py holds every family against the model itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_finetune.errors import ConfigError
from ds_finetune.families.family import Family
from ds_finetune.families.parameters import ModelConfig, ParameterRules, Shape, Tensors, indexed_layers
from ds_finetune.families.table import FAMILIES, family_of

EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
HEAD, SCORE_HEAD = "lm_head.weight", "score.weight"
PER_LAYER: Mapping[str, str | None] = {"layer_types": None, "mlp_layer_types": None, "indexer_types": "full"}
"""Lists of a config.json with an entry for each layer, and the entry of a multi-token prediction layer; None for that
of the last layer. It has an indexer of its own in published checkpoints, whatever the last layer has.
"""


_COMPRESSED: Mapping[str, str | int] = {
    "layer_types": "sliding_attention",
    "mlp_layer_types": "moe",
    "compress_ratios": 0,
}
"""The entries of a multi-token prediction layer of DeepSeek-V4, whose tensors have no compressor and no table of token
ids.
"""


class LayerKind(NamedTuple):
    """What tells the layers of a model apart."""

    is_sparse: bool
    """Whether it has routed experts."""
    has_indexer: bool = False
    is_prediction: bool = False
    """Whether it is a multi-token prediction layer."""
    attention: str = ""
    """The kind of its attention, where layers differ in it."""


@dataclass(frozen=True)
class ModelTensors:
    """All parameters of a model, those of its layers by their kinds."""

    layers: tuple[LayerKind, ...]
    """The kind of each layer; multi-token prediction layers come last."""
    of_kind: Mapping[LayerKind, Tensors]
    """Tensors of a layer by kind, by their names within it."""
    ends: Tensors
    """Tensors outside of layers by their full names: embedding, last norm, and head or score head unless it is tied."""
    is_tied: bool
    """Whether the head is the embedding."""

    def named(self) -> Iterator[tuple[str, Shape]]:
        """Every parameter once, with its full name."""
        for name, shape in self.ends.items():
            if name == EMBEDDING:
                yield name, shape
        for number, kind in enumerate(self.layers):
            for name, shape in self.of_kind[kind].items():
                yield f"model.layers.{number}.{name}", shape
        for name, shape in self.ends.items():
            if name != EMBEDDING:
                yield name, shape


def model_tensors(config: ModelConfig, *, mtp_layers: int = 0, scores: int = 0) -> ModelTensors:
    """The parameters of a model with `mtp_layers` multi-token prediction layers that are trained, and with a head of
    `scores` outputs for a document instead of that for tokens where it is above 0.

    ConfigError where a key is missing, or where the tensors of the model type are not known; it names the part.
    """
    family = family_of(str(config.get("model_type")))
    rules = known_rules(family)
    try:
        kinds = layer_kinds(config, mtp_layers=mtp_layers)
        of_kind = {kind: _layer(config, kind, family, rules) for kind in dict.fromkeys(kinds)}
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    except KeyError as absent:
        raise ConfigError(
            f"config.json of a {config.get('model_type')} model has no {absent}",
            hint="take the config.json published with the model",
        ) from None
    is_tied = bool(config.get("tie_word_embeddings", False)) and not scores
    ends: dict[str, Shape] = {EMBEDDING: (vocabulary, hidden), FINAL_NORM: (hidden,)}
    if scores:
        ends[SCORE_HEAD] = (scores, hidden)
    elif not is_tied:
        ends[HEAD] = (vocabulary, hidden)
    ends |= rules.ends(config)
    return ModelTensors(kinds, of_kind, ends, is_tied)


def known_rules(family: Family) -> ParameterRules:
    """The rules of a family; ConfigError with the part that is not known where it has none."""
    if family.parameters is not None:
        return family.parameters
    known = ", ".join(sorted(name for name, row in FAMILIES.items() if row.parameters))
    part = "attention and the MLPs between its experts" if family.expert_keys is not None else "the layers"
    raise ConfigError(f"of model_type {family.model_type} {part} are not known by arithmetic", hint=f"known: {known}")


def layer_kinds(config: ModelConfig, *, mtp_layers: int = 0) -> tuple[LayerKind, ...]:
    """The kind of each layer, and of `mtp_layers` prediction layers, which are like the last one but have indexers of
    their own.
    """
    family = family_of(str(config.get("model_type")))
    rules, number = known_rules(family), config["num_hidden_layers"]
    indexed = frozenset(indexed_layers(config)) if family.indexer is not None else frozenset()
    kinds = [
        LayerKind(rules.is_sparse(config, layer), layer in indexed, attention=rules.type_of(config, layer))
        for layer in range(number)
    ]
    longer = with_layers(config, mtp_layers)
    kinds += [
        LayerKind(
            rules.is_sparse(longer, layer),
            family.indexer is not None and not family.compresses,
            is_prediction=True,
            attention=rules.type_of(longer, layer),
        )
        for layer in range(number, number + mtp_layers)
    ]
    return tuple(kinds)


def with_layers(config: ModelConfig, number: int) -> dict[str, Any]:
    """The config.json of a model with so many multi-token prediction layers after its last layer."""
    longer = longer_lists(config, config["num_hidden_layers"], number)
    return {**config, **longer, "num_hidden_layers": config["num_hidden_layers"] + number}


def longer_lists(config: ModelConfig, layers: int, number: int) -> dict[str, list[Any]]:
    """The lists of a config.json of `layers` layers with entries for `number` prediction layers too."""
    if family_of(str(config.get("model_type"))).compresses:
        return {key: [*config[key][:layers], *[kind] * number] for key, kind in _COMPRESSED.items() if config.get(key)}
    return {
        key: [*config[key], *[kind or config[key][-1]] * number] for key, kind in PER_LAYER.items() if config.get(key)
    }


def _layer(c: ModelConfig, kind: LayerKind, family: Family, rules: ParameterRules) -> dict[str, Shape]:
    hidden = c["hidden_size"]
    attention = rules.attention(c)
    tensors = {**attention.projections, **attention.inner_norms, **(attention.indexer if kind.has_indexer else {})}
    found = {f"self_attn.{name}": shape for name, shape in tensors.items()}
    found |= _experts(c, family, rules) if kind.is_sparse else _mlp("mlp", c, c["intermediate_size"], rules)
    found |= rules.of_type(c, kind.attention)
    found |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if not kind.is_prediction:
        return found
    found |= {"enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
    if not family.compresses:
        return found | {"eh_proj.weight": (hidden, 2 * hidden), "shared_head.norm.weight": (hidden,)}
    found |= {"e_proj.weight": (hidden, hidden), "h_proj.weight": (hidden, hidden), "norm.weight": (hidden,)}
    found |= {name.removeprefix("model."): shape for name, shape in rules.ends(c).items()}
    return {f"{family.mtp_module}{name}": shape for name, shape in found.items()}


def _mlp(module: str, c: ModelConfig, inner: int, rules: ParameterRules) -> dict[str, Shape]:
    hidden, found = c["hidden_size"], dict[str, Shape]()
    for name, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        found[f"{module}.{name}_proj.weight"] = (outputs, inputs)
        if rules.mlp_bias and c.get("mlp_bias"):
            found[f"{module}.{name}_proj.bias"] = (outputs,)
    return found


def _experts(c: ModelConfig, family: Family, rules: ParameterRules) -> dict[str, Shape]:
    keys, hidden = family.expert_keys, c["hidden_size"]
    assert keys is not None, family.model_type
    experts, inner, shared = keys.number(c), keys.width(c), c.get("n_shared_experts") or 0
    router = family.router.module if family.router is not None else "mlp.gate"
    found: dict[str, Shape] = {f"{router}.weight": (experts, hidden)}
    if family.transposed_experts:
        found |= {"mlp.experts.gate_up_proj": (experts, hidden, 2 * inner)}
        found |= {"mlp.experts.down_proj": (experts, inner, hidden)}
    else:
        found |= {"mlp.experts.gate_up_proj": (experts, 2 * inner, hidden)}
        found |= {"mlp.experts.down_proj": (experts, hidden, inner)}
    if rules.expert_bias:
        found |= {f"{router}.bias": (experts,), "mlp.experts.gate_up_proj_bias": (experts, 2 * inner)}
        found |= {"mlp.experts.down_proj_bias": (experts, hidden)}
    return found | (_mlp("mlp.shared_experts", c, shared * inner, rules) if shared else {})
