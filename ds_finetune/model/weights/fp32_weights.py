"""Parameters that a family uses in fp32 even in a 16-bit run.

DeepSpeed 0.19.8 casts every parameter to the run's precision (runtime/keep_in_fp32.py excludes only buffers), and makes
the optimizer's fp32 copies of the cast values. So this module also holds the fp32 values, unsharded on each rank.
Modules compute with them, and the 16-bit parameters get the gradients.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import Fragment, Where, full_fragment


class _InFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.dtype = param.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return grad.to(ctx.dtype), None


class Fp32Weights:
    """The fp32 values of the parameters that the family of `lm` uses in fp32. Empty for an fp32 run."""

    def __init__(self, lm: PreTrainedModel, where: Where = full_fragment) -> None:
        family, self._where = family_of(lm.config.model_type), where
        self.params: dict[str, nn.Parameter] = {
            name: param
            for name, param in lm.named_parameters()
            if param.dtype != torch.float32 and family.is_in_fp32(name)
        }
        self.values = {
            name: torch.zeros(where(param).shape, dtype=torch.float32, device=param.device)
            for name, param in self.params.items()
        }
        self._of_param = {id(param): self.values[name] for name, param in self.params.items()}

    def where(self, param: torch.Tensor) -> Fragment:
        """The fragment into which `param` is loaded: its fp32 value if it has one, else this rank's part of `param`."""
        value = self._of_param.get(id(param))
        return self._where(param) if value is None else full_fragment(value)

    def round_into_parameters(self) -> None:
        """Set each 16-bit parameter with an fp32 value to this value, rounded."""
        for name, param in self.params.items():
            self._where(param).write(self.values[name].view(-1))

    def install(self, lm: nn.Module) -> None:
        """Make modules of `lm` compute with the fp32 values, in place."""
        for name in self.params:
            owner, _, leaf = name.rpartition(".")
            module = lm.get_submodule(owner)
            module.__class__ = _reading_fp32(type(module), leaf)  # type: ignore[arg-type]
            module.__dict__[f"_fp32_{leaf}"] = self.values[name]


@lru_cache
def _reading_fp32(kind: type[nn.Module], leaf: str) -> type[nn.Module]:

    def read(module: nn.Module) -> torch.Tensor:
        param, value = module._parameters[leaf], module.__dict__[f"_fp32_{leaf}"]
        assert param is not None
        return _InFp32.apply(param, value) if param.requires_grad else value  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {leaf: property(read)})
