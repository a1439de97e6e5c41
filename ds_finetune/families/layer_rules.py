"""Which layers of a model have indexers and compressors, and the sizes of its experts, from its config.json as
transformers 5.23 reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ModelConfig = Mapping[str, Any]
"""The contents of a config.json."""


_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATES: Mapping[str, int] = {_SPARSE: 4, _HEAVY: 128}
"""Tokens of an entry by kind of attention, unless `compress_rates` says others."""
OLDER_RATES: Mapping[str, str] = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
"""Keys that transformers reads in place of `compress_rates`."""
RATIOS: Mapping[int, str] = {0: "sliding_attention", 4: _SPARSE, 128: _HEAVY}
"""Kinds of attention of DeepSeek-V4 by the published `compress_ratios`; 0 where nothing is compressed."""


def compressed_types(c: ModelConfig) -> tuple[str, ...]:
    """The kind of attention of each layer of DeepSeek-V4: `layer_types`, or as it is published `compress_ratios`.
    KeyError where a ratio is not known.
    """
    kinds = c.get("layer_types") or [RATIOS[ratio] for ratio in c["compress_ratios"]]
    return tuple(kinds[: c["num_hidden_layers"]])


def longest_window(c: ModelConfig) -> int:
    """Tokens of the longest window that a layer of DeepSeek-V4 compresses into an entry; 0 where none does."""
    return max((_rate(c, kind) for kind in compressed_types(c) if kind in RATES), default=0)


def hashed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers of DeepSeek-V4 whose routers choose experts by the ids of tokens."""
    kinds = c.get("mlp_layer_types") or ["hash_moe"] * c.get("num_hash_layers", 0)
    return tuple(layer for layer, kind in enumerate(kinds[: c["num_hidden_layers"]]) if kind == "hash_moe")


def entry_tokens(c: ModelConfig) -> int:
    """Tokens of the windows of the entries that an indexer of DeepSeek-V4 chooses from."""
    return _rate(c, _SPARSE)


def published_layers(c: ModelConfig) -> dict[str, Any]:
    """The keys by which DeepSeek-V4 is published in place of those of transformers 5.23 in `c`, where these are there:
    kinds of layers as numbers, hash routers, and the scaling of the rotary embedding of layers that compress.
    """
    kinds, rope = c.get("layer_types"), c.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    if kinds and all(_rate(c, kind) == rate for kind, rate in RATES.items()):
        numbers = {kind: ratio for ratio, kind in RATIOS.items()}
        found["compress_ratios"] = [numbers[kind] for kind in kinds]
    if c.get("mlp_layer_types"):
        found["num_hash_layers"] = list(c["mlp_layer_types"]).count("hash_moe")
    if scaling := rope.get("compress"):
        kept = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate")
        kind = scaling.get("rope_type", "default")
        scaled = {"type": kind, **{key: scaling[key] for key in kept if key in scaling}}
        found["rope_scaling"] = None if kind == "default" else scaled
    return found


def _rate(c: ModelConfig, kind: str) -> int:
    """Tokens of a window: of `compress_rates`, or of the keys that transformers reads in its place."""
    return int(c.get(OLDER_RATES[kind]) or (c.get("compress_rates") or RATES)[kind])


def indexed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers with an indexer (transformers 5.23, glm_moe_dsa/configuration_glm_moe_dsa.py)."""
    if c.get("compress_ratios") or c.get("compress_rates"):
        return tuple(layer for layer, kind in enumerate(compressed_types(c)) if kind == _SPARSE)
    types = c.get("indexer_types") or c.get("index_topk_pattern")
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind in ("full", "F"))
    every, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    return tuple(layer for layer in range(c["num_hidden_layers"]) if max(layer - offset + 1, 0) % every == 0)


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of config.json that give the sizes of routed experts; the defaults are DeepSeek's.

    Its methods read a config.json as published or as transformers 5.23 writes it. KeyError where a key is absent.
    """

    number_keys: tuple[str, ...] = ("n_routed_experts",)
    """Keys of their number in a layer: the published one, and others that transformers writes in its place."""
    per_token_key: str = "num_experts_per_tok"
    width_key: str = "moe_intermediate_size"
    """Key of the inner width of an expert."""

    def number(self, config: Mapping[str, Any]) -> int:
        """Experts of a layer."""
        return int(config[self.number_key(config)])

    def per_token(self, config: Mapping[str, Any]) -> int:
        """Experts that a token is sent to."""
        return int(config[self.per_token_key])

    def width(self, config: Mapping[str, Any]) -> int:
        """Columns of an expert's gate and up projections."""
        return int(config[self.width_key])

    def number_key(self, config: Mapping[str, Any]) -> str:
        """The key of `number_keys` that `config` has; the published one where it has none."""
        return next((key for key in self.number_keys if key in config), self.number_keys[0])


QWEN_EXPERTS = ExpertKeys(number_keys=("num_experts", "num_local_experts"))
"""Published configurations have the first key; transformers 5.23 writes the second."""
