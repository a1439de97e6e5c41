"""Builds models without memory: on torch's meta device, to list names and shapes of tensors, and on fake tensors, whose
forward and backward show which parameters get no gradient from the loss.
"""

import copy
from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import FinetuneError, ModelError
from ds_finetune.families.table import family_of
from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model.build.skeleton import Task, head_of, model_class
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.pipeline import build_meta_model, has_tied_head
from ds_finetune.model.parallel.sharding import tensor_of
from ds_finetune.plan.layer_stages import StageLayers, stages_of
from ds_finetune.plan.model_tensors import DescribedModel, ModelTensors

_FEW_TOKENS = 16
_NO_MEMORY_EXPERTS = "batched_mm"
"""The experts' implementation in transformers 5.23 that works on fake tensors. It reads no indices on the host."""


def read_tensors(hf_config: PretrainedConfig, task: Task = "causal_lm") -> ModelTensors:
    """Names and shapes of the tensors of the model with configuration `hf_config`. ModelError if it cannot be built."""
    try:
        lm = build_meta_model(hf_config, task)
    except FinetuneError:
        raise
    except Exception as broken:
        reason = " ".join(f"{type(broken).__name__}: {broken}".split())
        raise ModelError(
            f"a model of model_type `{hf_config.model_type}` cannot be built from its config.json: {reason}",
            hint="take the config.json published with the model",
        ) from broken
    is_transposed = family_of(hf_config.model_type).transposed_experts
    tensors = {
        name: tensor_of(name, tuple(parameter.shape), has_transposed_experts=is_transposed)
        for name, parameter in lm.named_parameters()
    }
    linears = linear_weights(lm) if family_of(hf_config.model_type).is_generic else ()
    return ModelTensors(tensors, has_tied_head(lm), len(mtp_layers(hf_config)), linears)


def linear_weights(lm: PreTrainedModel) -> tuple[str, ...]:
    """Names of the weights of a model's linear modules, without the head."""
    modules = ((name, each) for name, each in lm.named_modules() if isinstance(each, nn.Linear))
    return tuple(f"{name}.weight" for name, each in modules if each is not head_of(lm))


def described(
    hf_config: PretrainedConfig, task: Task = "causal_lm", *, teacher: PretrainedConfig | None = None
) -> DescribedModel:
    """Names and shapes of the tensors of a model, and of its teacher if there is one."""
    return DescribedModel(
        hf_config.to_dict(),
        partial(read_tensors, hf_config, task),
        teacher=None if teacher is None else described(teacher),
    )


def layers_of_stages(
    hf_config: PretrainedConfig, parallel: ParallelConfig, task: Task = "causal_lm"
) -> tuple[StageLayers | None, ...]:
    """The layers of each pipeline stage; (None,) without pipeline parallelism."""
    return stages_of(read_tensors(hf_config, task), parallel) if parallel.pp > 1 else (None,)


def unused_parameters(hf_config: PretrainedConfig, *, tokens: int, task: Task = "causal_lm") -> tuple[str, ...]:
    """Names of parameters that get no gradient from a row of `tokens` tokens, in the model's order.

    The full model is built on fake tensors, in some seconds. NotImplementedError if the model's code reads values of
    tensors.
    """
    # A short row is tried first, because it is fast. Some layers use all their parameters only with many tokens.
    names = _without_gradient(hf_config, _FEW_TOKENS, task)
    if not names:
        return ()
    longest = getattr(hf_config, "max_position_embeddings", None) or tokens
    used_later = set(names) - set(_without_gradient(hf_config, min(tokens, longest), task))
    return tuple(name for name in names if name not in used_later)


def _without_gradient(hf_config: PretrainedConfig, tokens: int, task: Task) -> list[str]:
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    config._attn_implementation = "eager"
    try:
        with fake_tensors():
            with no_init_weights():
                # In training mode some model types would drop layers at random.
                model = model_class(config, task)(config).eval()
            if getattr(model.config, "_experts_implementation", None):
                model.config._experts_implementation = _NO_MEMORY_EXPERTS
            logits = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits
            logits.float().sum().backward()
            return [name for name, param in model.named_parameters() if param.grad is None]
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as unknown:
        lines = str(unknown).strip().splitlines() or [type(unknown).__name__]
        raise NotImplementedError(lines[0]) from unknown
