"""Selective recomputation: the same bits as full recomputation, and no second run of what it keeps."""

import gc
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.model import kept_outputs
from ds_finetune.model.activation_memory import install_tiled_mlps, is_random, recompute_layers
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.skeleton import build_skeleton, full_fragment
from ds_finetune.model.kept_outputs import SAVED_OPERATIONS, layer_contexts, save_outputs
from ds_finetune.model.parallel.expert import compute_shared_experts_ahead
from ds_finetune.plan.lora_targets import adapted_targets, targets_among
from tests.model.tiny import CONFIGS

LAYERS, TOKENS = 2, 16
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
GROUPED = "aten::_grouped_mm"
DETACH = "aten::detach"
"""How often it runs depends on what is kept; it copies nothing."""


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def model_of(family: str, dtype: torch.dtype = torch.float32, *, has_lora: bool = False) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **CONFIGS[family] | {"num_hidden_layers": LAYERS})
    lm = build_skeleton(config, attention="sdpa", dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*lm.parameters(), *(each for each in lm.buffers() if each.is_floating_point())):
            if tensor.ndim > 1 or "bias" not in family:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05 + (tensor.ndim == 1))
    if has_lora:
        lora = LoraConfig(rank=8)
        targets = adapted_targets(targets_among(read_tensors(config).shapes()), lora)
        install_lora(lm, targets, lora, seed=0, placement=AdapterPlacement(full_fragment))
        with torch.no_grad():
            for name, param in lm.named_parameters():
                if "lora_B" in name:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.05)
    return lm


def train(lm: PreTrainedModel, forwards: int = 1) -> tuple[list[torch.Tensor], Counter[str], Counter[str]]:
    """Losses and gradients of forwards that are all alive before the first backward, and operations of both passes."""
    rows = [torch.arange(1 + number, 1 + number + TOKENS)[None] for number in range(forwards)]
    with Operations() as forward:
        losses = [lm(input_ids=ids, labels=ids).loss for ids in rows]
    with Operations() as backward:
        for loss in losses:
            loss.backward()
    gradients = [param.grad for param in lm.parameters() if param.grad is not None]
    return [*(loss.detach() for loss in losses), *gradients], forward.counts, backward.counts


def recomputed(family: str, *, is_selective: bool, forwards: int = 1, **options: Any) -> Any:
    lm = model_of(family, **options)
    recompute_layers(lm, is_selective=is_selective)
    # The engine does so for selective recomputation; the order of gradients' sums should be the same here.
    compute_shared_experts_ahead(lm)
    return train(lm, forwards)


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe", "gpt_oss", "olmoe"])
def test_losses_and_gradients_have_the_same_bits(family: str, dtype: torch.dtype, has_lora: bool) -> None:
    options: dict[str, Any] = {"dtype": dtype, "has_lora": has_lora, "forwards": 2}
    full, selective = (recomputed(family, is_selective=each, **options)[0] for each in (False, True))
    assert len(full) > LAYERS
    assert all(torch.equal(a, b) for a, b in zip(full, selective, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
def test_what_is_kept_is_not_computed_again(family: str) -> None:
    _, forward, full = recomputed(family, is_selective=False)
    _, same, selective = recomputed(family, is_selective=True)
    assert {**forward, DETACH: 0} == {**same, DETACH: 0}
    assert (full[ATTENTION], selective[ATTENTION]) == (forward[ATTENTION], 0)
    # Backward has two products for each one of forward; recomputation ends before the last one.
    grouped = forward[GROUPED] // 2
    assert (full[GROUPED], selective[GROUPED]) == (5 * grouped, 4 * grouped)
    assert grouped == {"llama": 0, "qwen3_moe": LAYERS, "deepseek_v2": LAYERS - 1}[family]
    rest = {name: count for name, count in full.items() if name not in SAVED_OPERATIONS and name != DETACH}
    assert {name: selective[name] for name in rest} == rest


@pytest.mark.parametrize("is_selective", [False, True], ids=["full", "selective"])
def test_layers_before_the_first_adapter_are_not_computed_again(is_selective: bool) -> None:
    """Nothing that backward needs is within them, and their inputs are not kept either."""
    lm, inputs = model_of("llama", has_lora=True), []
    first, last = lm.model.layers
    first.requires_grad_(False)
    for layer in (first, last):
        layer.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0])))
    recompute_layers(lm, is_selective=is_selective)
    with Operations() as forward:
        loss = lm(input_ids=torch.arange(1, 1 + TOKENS)[None], labels=torch.arange(TOKENS)[None]).loss
    gc.collect()
    assert [tensor() is not None for tensor in inputs] == [False, True]
    with Operations() as backward:
        loss.backward()
    assert (forward.counts[ATTENTION], backward.counts[ATTENTION]) == (LAYERS, 0 if is_selective else 1)
    assert all(param.grad is not None for name, param in last.named_parameters() if "lora_" in name)


def test_tiles_keep_nothing_of_experts() -> None:
    models = [model_of("qwen3_moe") for _ in range(2)]
    found = []
    for lm, is_selective in zip(models, (False, True), strict=True):
        recompute_layers(lm, is_selective=is_selective)
        install_tiled_mlps(lm, tiles=2)
        found.append(train(lm))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][2][GROUPED] == found[1][2][GROUPED]


def test_a_kept_output_that_is_changed_in_place_is_an_error() -> None:
    attend = save_outputs(torch.nn.functional.scaled_dot_product_attention)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(hidden, hidden, hidden) * 1
        changed = attend(out, out, out)
        changed.add_(1)
        return changed.sin()

    hidden = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = checkpoint(layer, hidden, use_reentrant=False, context_fn=partial(layer_contexts, is_selective=True))
    with pytest.raises(AssertionError, match="changed in place"):
        out.sum().backward()


def _scores_times_values(query: Any, key: Any, value: Any, mask: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) * mask) @ value


@torch.library.custom_op("ds_finetune_tests::attend", mutates_args=())
def attend_at_random(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, p: float) -> list[torch.Tensor]:
    """Attention that draws its own dropout, as kernels of GPUs do; returns the mask for backward too."""
    shape = (*query.shape[:-1], key.shape[-2])
    mask = (torch.rand(shape) >= p).float() if p else torch.ones(shape)
    return [_scores_times_values(query, key, value, mask), mask]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> Any:
    *inputs, mask = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in inputs]
        return *torch.autograd.grad(_scores_times_values(*inputs, mask), inputs, grads[0]), None


attend_at_random.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3], output[1])
)


@pytest.mark.parametrize("attention", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [0.0, 0.1])
def test_dropouts_after_attention_draw_what_they_drew_in_forward(
    attention: float, hidden: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*inputs: torch.Tensor, dropout_p: float = 0.0, **_: Any) -> torch.Tensor:
        return attend_at_random(*inputs[:3], dropout_p)[0]

    monkeypatch.setattr(kept_outputs, "SAVED_OPERATIONS", SAVED_OPERATIONS | {"ds_finetune_tests::attend"})
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", save_outputs(attend))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropouts = {"attention_probs_dropout_prob": attention, "hidden_dropout_prob": hidden}
    config = AutoConfig.for_model("bert", vocab_size=64, attn_implementation="sdpa", **sizes, **dropouts)
    found = {}
    for mode in ("none", "full", "selective"):
        torch.manual_seed(0)
        lm = AutoModelForSequenceClassification.from_config(config).train()
        if mode != "none":
            recompute_layers(lm, is_selective=mode == "selective")
        torch.manual_seed(1)
        lm(input_ids=torch.arange(1, 33).view(2, 16), labels=torch.tensor([0, 1])).loss.backward()
        found[mode] = [param.grad for param in lm.parameters() if param.grad is not None]
    for mode in ("full", "selective"):
        assert all(torch.equal(a, b) for a, b in zip(found["none"], found[mode], strict=True)), mode


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
        ("mixtral", {"router_jitter_noise": 0.1}, True),
        ("gpt2", {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}, True),
    ],
)
def test_random_numbers_are_kept_where_layers_draw_some(family: str, changes: dict[str, float], expected: bool) -> None:
    assert is_random(AutoConfig.for_model(family, **changes)) == expected


def test_a_layer_can_be_recomputed_twice() -> None:
    """As by two backwards through one graph."""
    hidden = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(
        torch.sin, hidden, use_reentrant=False, context_fn=partial(layer_contexts, is_selective=False)
    ).sum()
    for keeps in (True, False):
        (grad,) = torch.autograd.grad(out, hidden, retain_graph=keeps)
        assert torch.equal(grad, hidden.cos())
