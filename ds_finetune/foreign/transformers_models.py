"""Patches of transformers: construction of decoder layers and experts, and the list of buffers that stay in fp32."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.foreign.guard import Foreign, replaced

_LAYERS = Foreign("transformers", "modeling_utils.py:1105 and the decoder layer of each model file")
_EXPERTS = Foreign("transformers", "the experts class of each model file")
_KEPT = Foreign("transformers", "modeling_utils.py:1112, 1303")

LayerFactory = Callable[[type[nn.Module], PretrainedConfig, int], nn.Module]
"""Function from layer class, configuration and layer number to a decoder layer, or a module that replaces it."""


@contextmanager
def replaced_layers(model_class: type[PreTrainedModel], factory: LayerFactory) -> Iterator[None]:
    """Context in which models of `model_class` are constructed with decoder layers from `factory`.

    transformers would construct every layer, but a pipeline stage has only some layers, and no memory for all.
    """
    module = sys.modules[model_class.__module__]
    names = [name for name in model_class._no_split_modules or () if name.endswith("DecoderLayer")]
    layer_class = _LAYERS.attribute(module, names[0] if len(names) == 1 else "DecoderLayer")
    _LAYERS.parameters(layer_class, "config", "layer_idx")

    def make(config: PretrainedConfig, layer_idx: int) -> nn.Module:
        return factory(layer_class, config, layer_idx)

    with replaced(module, names[0], make):
        yield


@contextmanager
def changed_experts(
    model_class: type[PreTrainedModel], name: str, change: Callable[[Any], Any], *, after: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Context in which the routed experts (class `name`) of models of `model_class` are constructed with the model's
    configuration as `change` returns it, and then passed to `after`.

    transformers would construct all experts of a layer, but an expert parallel rank holds only some of them.
    """
    experts_class = _EXPERTS.attribute(sys.modules[model_class.__module__], name)
    constructor = experts_class.__init__
    _EXPERTS.parameters(constructor, "config")

    def init(module: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        constructor(module, change(config), *args, **kwargs)
        after(module)

    with replaced(experts_class, "__init__", init):
        yield


def keep_in_fp32(model: PreTrainedModel, names: Collection[str]) -> None:
    """Keep the buffers of `model` whose names contain one of `names` in fp32, by adding them to the model's list of
    fp32 modules. DeepSpeed casts all other buffers (0.19.8, runtime/keep_in_fp32.py).
    """
    listed = _KEPT.attribute(model, "_keep_in_fp32_modules_strict")
    model._keep_in_fp32_modules_strict = {*(listed or ()), *names}
