"""Pipeline stages as models: which layers each has, and what replaces the rest."""

from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.cache_utils import DynamicCache

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.model.build.meta_model import layers_of_stages
from ds_finetune.model.build.skeleton import build_skeleton, model_class
from ds_finetune.model.mtp import set_mtp_layers
from ds_finetune.model.parallel.pipeline import (
    MissingLayer,
    PipelineGroup,
    build_meta_model,
    build_only_layers,
    has_embedding_copy,
    install_pipeline_stage,
)
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.reference.selftest.cells import hf_config


@pytest.mark.parametrize(
    ("family", "vpp"),
    [
        ("deepseek_v2", 1),
        ("deepseek_v3_deep", 1),
        ("deepseek_v3_deep", 2),
        ("llama_deep", 1),
        ("llama_deep", 2),
        ("qwen2", 1),
        ("qwen2_deep", 2),
        ("qwen3", 1),
    ],
)
def test_stages_hold_every_tensor_once_by_its_own_name(family: str, vpp: int) -> None:
    whole = build_meta_model(hf_config(family))
    config = hf_config(family)
    layers = layers_of_stages(config, ParallelConfig(pp=2, vpp=vpp))
    found: dict[str, torch.Size] = {}
    copies = []
    for place, part in enumerate(layers):
        stage = PipelineGroup(None, 2, place)
        with build_only_layers(model_class(config), part):
            lm = build_skeleton(hf_config(family), attention="sdpa", dtype=torch.float32, device="cpu")
        install_pipeline_stage(lm, stage, outputs=config.vocab_size)
        own = {name: param.shape for name, param in lm.named_parameters()}
        copies += [name for name in own if name in found]
        found |= own
        assert has_embedding_copy(lm, stage) == (config.tie_word_embeddings and place == 1)
    assert found == {name: param.shape for name, param in whole.named_parameters()}
    assert copies == (["model.embed_tokens.weight"] if config.tie_word_embeddings else [])


def test_a_class_of_layers_is_put_back() -> None:
    kind = model_class(hf_config("llama"))
    with build_only_layers(kind, range(1)):
        lm = build_skeleton(hf_config("llama"), attention="sdpa", dtype=torch.float32, device="cpu")
    assert [isinstance(layer, MissingLayer) for layer in lm.base_model.layers] == [False, True]
    whole = build_skeleton(hf_config("llama"), attention="sdpa", dtype=torch.float32, device="cpu")
    assert not any(isinstance(layer, MissingLayer) for layer in whole.base_model.layers)


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_a_cache_counts_the_tokens_of_a_layer_that_is_elsewhere(keyword: str) -> None:
    cache, hidden = DynamicCache(), torch.randn(2, 5, 8)
    assert MissingLayer(0)(hidden, **{keyword: cache}) is hidden
    MissingLayer(0)(hidden[:, :1], **{keyword: cache})
    assert cache.get_seq_length() == 6


def _held(*stages: range) -> tuple[StageLayers, ...]:
    return tuple(StageLayers((layers,)) for layers in stages)


def test_a_stage_without_experts_to_share_out_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of_stages(hf_config("deepseek_v3"), ParallelConfig(pp=2, ep=2))
    assert "but stage 0 of parallel.pp 2 (layers 0 to 0) has none" in caught.value.message
    assert caught.value.hint == "layers 1 to 1 have experts; set parallel.pp_layers, or a smaller parallel.pp"
    assert layers_of_stages(hf_config("deepseek_v3_deep"), ParallelConfig(pp=2, ep=2)) == _held(range(2), range(2, 4))
    given = ParallelConfig(pp=2, pp_layers=(3, 1))
    assert layers_of_stages(hf_config("deepseek_v3_deep"), given) == _held(range(3), range(3, 4))


def test_what_is_not_trained_on_a_stage_takes_no_memory() -> None:
    with build_only_layers(model_class(hf_config("llama")), range(1)):
        lm = build_skeleton(hf_config("llama"), attention="sdpa", dtype=torch.float32, device="cpu")
    install_pipeline_stage(lm, PipelineGroup(None, 2, 0), outputs=96)
    assert not list(lm.base_model.layers[1].parameters())
    assert isinstance(lm.get_output_embeddings(), nn.Linear)
    assert lm.get_output_embeddings().weight is None


def test_copies_of_a_tied_embedding_get_equal_gradients_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may add one after another on one stage and pairwise on the other: eight equal numbers in bf16 differ then."""
    ranks = 8
    total = (1 + torch.arange(128) / 128).bfloat16() * ranks
    monkeypatch.setattr(dist, "all_reduce", lambda grad, group: grad.copy_(total))

    def after_reduction(add: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        grads = []
        for rank in range(ranks):
            stage = PipelineGroup(cast(Any, None), 2, 0)
            stage.embedding_group, stage.adds_embedding = cast(Any, "both ends"), rank == 0
            grads.append(torch.rand(128).bfloat16())
            stage.all_reduce_embedding_grad(grads[-1])
        return add(grads) / ranks

    def one_by_one(grads: list[torch.Tensor]) -> torch.Tensor:
        return reduce(torch.add, grads)

    def pairwise(grads: list[torch.Tensor]) -> torch.Tensor:
        half = len(grads) // 2
        return grads[0] if half == 0 else pairwise(grads[:half]) + pairwise(grads[half:])

    first, last = after_reduction(one_by_one), after_reduction(pairwise)
    assert torch.equal(first, last)
    assert torch.equal(first, total / ranks)


def test_a_multi_token_prediction_layer_is_on_the_last_stage_with_a_copy_of_the_embedding() -> None:
    config = hf_config("deepseek_v3_deep")
    set_mtp_layers(config, 1)
    assert layers_of_stages(config, ParallelConfig(pp=2, pp_layers=(2, 2))) == _held(range(2), range(2, 5))
    first, last = layers_of_stages(config, ParallelConfig(pp=2))
    assert first is not None
    assert last is not None
    assert [*first, *last] == list(range(5))
    for place, layers in enumerate((first, last)):
        with build_only_layers(model_class(config), layers):
            lm = build_meta_model(config)
        stage = PipelineGroup(None, 2, place)
        install_pipeline_stage(lm, stage, outputs=config.vocab_size)
        assert has_embedding_copy(lm, stage) == (place == 1)
        assert any("eh_proj" in name for name, _ in lm.named_parameters()) == (place == 1)
