"""Attention with sinks and windows equals transformers' own on each document alone, values and gradients."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from ds_finetune.families.configs import GPT_OSS
from ds_finetune.model.attention import by_document as attention
from ds_finetune.model.attention.by_document import attend_by_document
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.weights.load import initialise_weights

ROWS = ((5, 9, 2), (16,), (1, 1, 14))


class _Module(nn.Module):
    """What attention needs of a module of gpt_oss."""

    def __init__(self, sinks: torch.Tensor, window: int | None) -> None:
        super().__init__()
        self.sinks, self.sliding_window, self.num_key_value_groups, self.is_causal = sinks, window, 2, True


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Queries of four heads, keys and values of two, and sinks near the other logits."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 4, 16, 8), (3, 2, 16, 8), (3, 2, 16, 8), (4,))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


def _alone(module: _Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """transformers' eager attention, one document at a time."""
    rows = []
    for row, lengths in enumerate(ROWS):
        documents, begin = [], 0
        for length in lengths:
            where = (slice(row, row + 1), slice(None), slice(begin, begin + length))
            distance = torch.arange(length)[:, None] - torch.arange(length)
            seen = (distance >= 0) & (distance < (module.sliding_window or length))
            mask = torch.zeros(length, length, dtype=query.dtype).masked_fill(~seen, float("-inf"))
            parts = (query[where], key[where], value[where])
            documents.append(eager_attention_forward(module, *parts, mask, scaling=8**-0.5)[0])
            begin += length
        rows.append(torch.cat(documents, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize(("window", "block"), [(None, 512), (1, 512), (4, 512), (1, 1), (1, 3), (4, 1), (4, 5)])
def test_packed_documents_equal_transformers_on_each_alone(
    window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the queries of a document that exceeds the window are taken some at a time."""
    monkeypatch.setattr(attention, "_WINDOW_BLOCK", block)
    tensors = _tensors()
    module = _Module(tensors[3], window)
    out, _ = attend_by_document(
        module, *tensors[:3], None, scaling=8**-0.5, documents=ROWS, sliding_window=window, s_aux=module.sinks
    )
    wanted = _alone(module, *tensors[:3])
    assert torch.allclose(out, wanted, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(wanted)
    gradients, wanted_gradients = (torch.autograd.grad((part * weight).sum(), tensors) for part in (out, wanted))
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert torch.allclose(gradient, wanted_gradient, rtol=1e-10, atol=1e-12)
    without, _ = attend_by_document(module, *tensors[:3], None, scaling=8**-0.5, documents=ROWS, sliding_window=window)
    assert (out - without).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_with_a_cache_equals_the_last_tokens(queries: int, window: int | None) -> None:
    query, key, value, sinks = _tensors()
    module = _Module(sinks, window)
    whole, _ = attend_by_document(module, query, key, value, None, scaling=0.3, s_aux=sinks)
    last, _ = attend_by_document(module, query[:, :, -queries:], key, value, None, scaling=0.3, s_aux=sinks)
    assert torch.allclose(last, whole[:, -queries:], rtol=1e-12)


def test_bf16_rounds_no_more_than_transformers() -> None:
    exact = _tensors()
    rounded = [tensor.detach().bfloat16() for tensor in exact]
    wanted = _alone(_Module(exact[3], 4), *exact[:3])
    module = _Module(rounded[3], 4)
    eager = _alone(module, *rounded[:3])
    out, _ = attend_by_document(module, *rounded[:3], None, scaling=8**-0.5, documents=ROWS, s_aux=module.sinks)
    assert (out - wanted).norm() < 1.1 * (eager - wanted).norm()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_on_packed_rows_equals_each_document_alone(checkpointing: bool) -> None:
    """The whole model, with a window in its first layer, against transformers' eager attention."""
    models = []
    for kind in ("sdpa", "eager"):
        config = AutoConfig.for_model("gpt_oss", **GPT_OSS)
        lm = build_skeleton(config, attention=kind, dtype=torch.float32, device="cpu")
        initialise_weights(lm, seed=2)
        with torch.no_grad():
            for layer in lm.model.layers:
                layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 4))
        models.append(TrainedModel(lm))
    if checkpointing:
        models[0].lm.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 90, (3, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ROWS])
    hidden = models[0].hidden(ids, positions, ROWS)
    alone = [
        torch.cat([models[1].hidden(part[None], torch.arange(len(part))[None], None)[0] for part in row.split(lengths)])
        for row, lengths in zip(ids, ROWS, strict=True)
    ]
    wanted = torch.stack(alone)
    assert (hidden - wanted).abs().max() < 1e-5 * wanted.abs().max()
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    for out in (hidden, wanted):
        (out * weight).sum().backward()
    gradients, wanted_gradients = (
        {name: param.grad for name, param in model.lm.named_parameters() if param.grad is not None} for model in models
    )
    assert gradients.keys() == wanted_gradients.keys()
    assert sum(name.endswith("sinks") for name in gradients) == 2
    for name, gradient in wanted_gradients.items():
        apart = (gradients[name] - gradient).norm() / gradient.norm()
        assert apart < 1e-5, (name, apart)
