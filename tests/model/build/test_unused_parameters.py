"""Parameters that no loss reaches are found by shapes alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ds_finetune.model.build import meta_model as module
from ds_finetune.model.build.meta_model import unused_parameters
from ds_finetune.plan.name_patterns import patterns_of
from ds_finetune.reference.selftest.cells import TINY_MODELS

INDEXED = TINY_MODELS["deepseek_v2"] | {
    "model_type": "deepseek_v32",
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
"""DeepSeek-V3.2's indexer chooses positions, and no gradient goes through a choice (transformers 5.23)."""


def test_the_indexer_of_sparse_attention_is_found() -> None:
    found = unused_parameters(AutoConfig.for_model(**INDEXED), tokens=32)
    assert found
    assert all(".self_attn.indexer." in name for name in found)
    assert "model.layers.*.self_attn.indexer.wq_b.weight (2)" in patterns_of(found)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "mamba"])
def test_a_model_without_such_parameters_has_none(model_type: str) -> None:
    """Experts that no token chose, sinks and states count as reached; the whole default model is built without memory."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=2)
    assert unused_parameters(config, tokens=4096) == ()


def test_a_layer_that_begins_at_many_tokens_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by a short row alone it would be frozen."""
    lengths = []

    def without_gradient(_: object, tokens: int, __: str) -> list[str]:
        lengths.append(tokens)
        return ["never", "late"] if tokens < 64 else ["never"]

    monkeypatch.setattr(module, "_without_gradient", without_gradient)
    assert unused_parameters(AutoConfig.for_model("llama"), tokens=128) == ("never",)
    assert lengths == [16, 128]


def test_code_that_needs_values_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.config, self.weight = config, nn.Parameter(torch.ones(1))

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> None:
            input_ids.sum().item()

    monkeypatch.setattr(module, "model_class", lambda config, task: Reads)
    with pytest.raises(NotImplementedError, match="_local_scalar_dense"):
        unused_parameters(AutoConfig.for_model("llama"), tokens=8)


def test_a_model_that_is_built_partly_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `Module.to`, as transformers 5.24 builds the norms of DeepSeek-V4 and of others."""
    norm = LlamaRMSNorm.__init__

    def in_fp32(module: nn.Module, *given: Any, **named: Any) -> None:
        norm(module, *given, **named)
        module.to(dtype=torch.float32)

    monkeypatch.setattr(LlamaRMSNorm, "__init__", in_fp32)
    assert unused_parameters(AutoConfig.for_model(**TINY_MODELS["llama"]), tokens=8) == ()
