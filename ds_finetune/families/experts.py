"""The sizes of a family's routed experts in config.json, and their names in published checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class MlpNames:
    """Names of MLPs and experts in published checkpoints; the defaults are also those of transformers 5.23."""

    module: str = "mlp"
    """The module in a layer."""
    gate: str = "gate_proj"
    """The projection of an expert that the activation function follows."""
    up: str = "up_proj"
    down: str = "down_proj"


AS_BUILT = MlpNames()
MIXTRAL_NAMES = MlpNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")
"""transformers 5.23, conversion_mapping.py:1270-1296."""
