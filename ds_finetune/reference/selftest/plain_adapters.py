"""Adapters in the plain loop: torch.nn.utils.parametrize adds the product of their factors to transformers' weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.model.adapters.lora import initial_factors
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.skeleton import Task
from ds_finetune.model.loss.score_head import head_parameters
from ds_finetune.plan.lora_targets import LoraTarget

_FACTOR = re.compile(r"\.parametrizations\.(\w+)\.0\.(lora_[AB])$")


@dataclass(frozen=True)
class PlainAdapters:
    """The `lora` section of a run file, for models of transformers; adapters are drawn from `seed`."""

    section: LoraConfig
    seed: int

    def freeze(self, model: PreTrainedModel, task: Task) -> None:
        """Leave nothing but a score head to be trained, and round the weights that the run holds in four bits."""
        lora = plan_lora(model.config, self.section, task)
        model.requires_grad_(False)
        for name in head_parameters(model):
            model.get_parameter(name).requires_grad_(True)
        for target in lora.quantised:
            weight = model.get_parameter(f"{target.name}.weight")
            weight.data = _rounded_to_four_bits(weight.data)

    def add(self, model: PreTrainedModel, task: Task) -> None:
        """Add the adapters as they are before the first step."""
        for target in plan_lora(model.config, self.section, task).targets:
            self._add_to(model.get_submodule(target.name), target)

    def _add_to(self, module: nn.Module, target: LoraTarget) -> None:
        for leaf, shape in target.shapes.items():
            factors = initial_factors(f"{target.name}.{leaf}", shape, self.section.rank, self.seed)
            scale = self.section.alpha / self.section.rank
            parametrize.register_parametrization(module, leaf, _LowRankSum(factors, scale))


class _LowRankSum(nn.Module):
    """Maps a weight [..., out, in] to its sum with scale x B A, of A [..., rank, in] and B [..., out, rank]."""

    def __init__(self, factors: Mapping[str, torch.Tensor], scale: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(factors["A"]), nn.Parameter(factors["B"])
        self._scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The merged weight."""
        return weight + self._scale * (self.lora_B @ self.lora_A)


def trained_name(name: str) -> str:
    """The name that a parameter of the plain model has in the trained one; adapters are named beside their weight."""
    return _FACTOR.sub(lambda match: f".{'' if match[1] == 'weight' else f'{match[1]}_'}{match[2]}", name)


def _rounded_to_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """The numbers that bitsandbytes reads from a weight in NF4 with double quantisation."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    held: Any = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    return dequantize_4bit(*held).to(weight.dtype)  # type: ignore[no-any-return]
