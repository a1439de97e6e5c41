"""Functions that read config.json like transformers 5.23: which layers have indexers, compressors or routed experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ModelConfig = Mapping[str, Any]
"""The keys and values of a model's config.json."""


_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATES: Mapping[str, int] = {_SPARSE: 4, _HEAVY: 128}
"""Default number of tokens per compressed entry, by DeepSeek-V4's kind of attention. `compress_rates` overrides it."""
OLDER_RATES: Mapping[str, str] = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
"""Older config.json keys for tokens per compressed entry, by kind of attention. They override `compress_rates`."""
RATIOS: Mapping[int, str] = {0: "sliding_attention", 4: _SPARSE, 128: _HEAVY}
"""DeepSeek-V4's kinds of attention, by the numbers of `compress_ratios` in published configurations."""


def compressed_types(c: ModelConfig) -> tuple[str, ...]:
    """Kind of attention of each DeepSeek-V4 layer, from config.json. KeyError for an unknown compression ratio."""
    kinds = c.get("layer_types") or [RATIOS[ratio] for ratio in c["compress_ratios"]]
    return tuple(kinds[: c["num_hidden_layers"]])


def longest_window(c: ModelConfig) -> int:
    """Largest number of tokens per compressed entry of attention in a DeepSeek-V4 model; 0 if no layer compresses."""
    return max((_rate(c, kind) for kind in compressed_types(c) if kind in RATES), default=0)


def hashed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the DeepSeek-V4 layers whose routers choose experts by token id."""
    kinds = c.get("mlp_layer_types") or ["hash_moe"] * c.get("num_hash_layers", 0)
    return tuple(layer for layer, kind in enumerate(kinds[: c["num_hidden_layers"]]) if kind == "hash_moe")


def entry_tokens(c: ModelConfig) -> int:
    """Number of tokens per compressed entry of attention in those DeepSeek-V4 layers that have an indexer."""
    return _rate(c, _SPARSE)


def published_layers(c: ModelConfig) -> dict[str, Any]:
    """DeepSeek-V4's layer settings under published keys (`compress_ratios`, `num_hash_layers`, `rope_scaling`),
    translated from `c`, a config.json of transformers 5.23.
    """
    kinds, rope = c.get("layer_types"), c.get("rope_parameters") or {}
    layers: dict[str, Any] = {}
    if kinds and all(_rate(c, kind) == rate for kind, rate in RATES.items()):
        numbers = {kind: ratio for ratio, kind in RATIOS.items()}
        layers["compress_ratios"] = [numbers[kind] for kind in kinds]
    if c.get("mlp_layer_types"):
        layers["num_hash_layers"] = list(c["mlp_layer_types"]).count("hash_moe")
    if scaling := rope.get("compress"):
        scaling_keys = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate")
        kind = scaling.get("rope_type", "default")
        scaled = {"type": kind, **{key: scaling[key] for key in scaling_keys if key in scaling}}
        layers["rope_scaling"] = None if kind == "default" else scaled
    return layers


def _rate(c: ModelConfig, kind: str) -> int:
    return int(c.get(OLDER_RATES[kind]) or (c.get("compress_rates") or RATES)[kind])


def indexed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers with an indexer (transformers 5.23, glm_moe_dsa/configuration_glm_moe_dsa.py)."""
    if c.get("compress_ratios") or c.get("compress_rates"):
        return tuple(layer for layer, kind in enumerate(compressed_types(c)) if kind == _SPARSE)
    types = c.get("indexer_types") or c.get("index_topk_pattern")
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind in ("full", "F"))
    frequency, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    return tuple(layer for layer in range(c["num_hidden_layers"]) if max(layer - offset + 1, 0) % frequency == 0)


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of config.json with the number and size of routed experts; the defaults are DeepSeek's.

    The methods accept a published config.json or one that transformers 5.23 saved. KeyError if a key is absent.
    """

    number_keys: tuple[str, ...] = ("n_routed_experts",)
    """Keys for the number of experts per layer: the published key first, then those that transformers saves."""
    width_key: str = "moe_intermediate_size"
    """config.json key for the inner width of an expert."""

    def number(self, config: Mapping[str, Any]) -> int:
        """Number of experts per layer."""
        return int(config[self.number_key(config)])

    def per_token(self, config: Mapping[str, Any]) -> int:
        """Number of experts that a router chooses for each token."""
        return int(config["num_experts_per_tok"])

    def width(self, config: Mapping[str, Any]) -> int:
        """Inner width of an expert: the outputs of its gate and up projections."""
        return int(config[self.width_key])

    def number_key(self, config: Mapping[str, Any]) -> str:
        """The first of `number_keys` that `config` has. If `config` has none of them, the published key."""
        return next((key for key in self.number_keys if key in config), self.number_keys[0])


QWEN_EXPERTS = ExpertKeys(number_keys=("num_experts", "num_local_experts"))
"""Qwen's config.json keys for experts. transformers 5.23 writes `num_local_experts` for the published `num_experts`."""
