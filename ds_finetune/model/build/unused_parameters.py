"""Finds parameters that get no gradient from the loss, by a forward and backward on fake tensors."""

import copy

import torch
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model.build.skeleton import Task, model_class

_FEW_TOKENS = 16
_NO_MEMORY_EXPERTS = "batched_mm"
"""Implementation of transformers 5.23's experts that works on fake tensors, because it reads no router indices."""


def unused_parameters(hf_config: PretrainedConfig, *, tokens: int, task: Task = "causal_lm") -> tuple[str, ...]:
    """Names of parameters without a gradient from a row of `tokens` tokens, in the model's order.

    The full model is built on fake tensors, in some seconds. NotImplementedError if the model's code reads values of
    tensors.
    """
    # A long row uses all parameters that a short row uses, and maybe more: some layers need many tokens to act.
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
