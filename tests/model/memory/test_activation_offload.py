"""Inputs of recomputed layers in host memory: the same bits, and the right tensors."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.model import activation_memory
from ds_finetune.model.activation_memory import _checkpoint_on_host, offload_layer_inputs
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.checking import check, settings_of
from tests.model.tiny import CONFIGS

LAYERS, TOKENS = 4, 12


class Watched(save_on_cpu):
    """torch's copies; notes what leaves, and spoils a kept input once it was used, so that none is used twice."""

    sent: list[tuple[int, ...]]
    returned: int

    def __init__(self, *, pin_memory: bool) -> None:
        assert pin_memory
        super().__init__(pin_memory=pin_memory)
        pack, unpack = self.pack_hook, self.unpack_hook

        def pack_noted(tensor: torch.Tensor) -> Any:
            Watched.sent.append(tuple(tensor.shape))
            return pack(tensor)

        def unpack_noted(kept: Any) -> torch.Tensor:
            Watched.returned += 1
            found = unpack(kept).clone()
            kept[1].fill_(float("nan"))
            return found

        self.pack_hook, self.unpack_hook = pack_noted, unpack_noted


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    Watched.sent, Watched.returned = [], 0
    monkeypatch.setattr(activation_memory, "save_on_cpu", Watched)
    return Watched


def lm(family: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family] | {"num_hidden_layers": LAYERS})
    model = AutoModelForCausalLM.from_config(config).float().to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def losses_and_gradients(model: Any, rounds: int = 1) -> list[torch.Tensor]:
    """Losses and gradients of `rounds` forwards that are all alive before the first backward, as in a pipeline."""
    device = model.lm_head.weight.device
    rows = [torch.arange(1 + n, 1 + n + TOKENS, device=device)[None] for n in range(rounds)]
    losses = [model(ids, labels=ids).loss for ids in rows]
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_losses_and_gradients_have_the_same_bits(watched: type[Watched], family: str, rounds: int) -> None:
    wanted = losses_and_gradients(lm(family), rounds)
    model = lm(family)
    offload_layer_inputs(model)
    found = losses_and_gradients(model, rounds)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    # Layer inputs alone, but that of the last layer; neither weights nor what is within a layer.
    assert watched.sent == [(1, TOKENS, model.config.hidden_size)] * (LAYERS - 1) * rounds
    assert watched.returned == len(watched.sent)


def test_other_arguments_of_a_layer_stay_where_they_are(watched: type[Watched]) -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    recompute = partial(checkpoint, use_reentrant=False)
    out = _checkpoint_on_host(recompute, lambda given, other: (given @ other).square(), hidden, weight)
    out.sum().backward()
    assert watched.sent == [(3, 4)]
    assert torch.allclose(weight.grad, 2 * hidden.T @ (hidden @ weight))


def test_nothing_is_kept_of_a_forward_without_gradients(watched: type[Watched]) -> None:
    model = lm("llama")
    offload_layer_inputs(model)
    with torch.no_grad():
        model(torch.arange(TOKENS)[None])
    assert not watched.sent


def test_frozen_layers_before_the_first_adapter() -> None:
    models = [lm("llama"), lm("llama")]
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_("layers.2." in name)
    offload_layer_inputs(models[1])
    wanted, found = map(losses_and_gradients, models)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _run(**train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": "none",
            "data": {"train": "none"},
            "train": train,
            "output_dir": "out",
            "checkpoint": {"every": "never"},
        }
    )


def test_a_cpu_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match=r"activation_offload true with device cpu: activations are in host memory"):
        make_plan(RunSettings.of(_run(activation_offload=True)), world=World(0, 1, 0, 1, "a test"), device="cpu")
    plan = make_plan(RunSettings.of(_run(activation_offload=True)), world=World(0, 1, 0, 1, "a test"), device="cuda")
    assert ("activations", "inputs of recomputed layers in host memory") in plan.decisions


@pytest.mark.parametrize("key", ["activation_offload", "tiled_mlp"])
@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"mtp": {"train": True}}, r"mtp\.train true"),
        ({"indexer": {"train": True}}, r"indexer\.train true"),
        ({"lora": {"quantize": "nf4"}}, r"lora\.quantize nf4"),
    ],
)
def test_what_no_test_covers_is_refused(key: str, section: dict[str, Any], said: str) -> None:
    tree = _run(**{key: True}).model_dump(by_alias=True) | section
    with pytest.raises(ConfigError, match=rf"train\.{key} true with {said} is not tested"):
        make_plan(RunSettings.of(RunConfig.model_validate(tree)), world=World(0, 1, 0, 1, "a test"), device="cuda")


SMOLLM = {"model_type": "smollm3"}


def test_types_without_a_comparison_are_refused() -> None:
    with pytest.raises(ConfigError, match="activation_offload true of model_type smollm3 is not tested"):
        check(settings_of(_run(activation_offload=True), model_json=SMOLLM), "activations of the model")
    check(settings_of(_run(), model_json=SMOLLM), "activations of the model")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: copies to pinned memory")
def test_on_a_gpu_the_bits_are_the_same_and_less_memory_is_held() -> None:
    wanted = losses_and_gradients(lm("llama", "cuda"), 2)
    model = lm("llama", "cuda")
    offload_layer_inputs(model)
    found = losses_and_gradients(model, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its memory is measured")
def test_on_a_gpu_the_inputs_of_layers_leave_its_memory() -> None:
    held = []
    for is_offloaded in (False, True):
        model: Any = lm("llama", "cuda")
        if is_offloaded:
            offload_layer_inputs(model)
        ids = (torch.arange(8192, device="cuda") % 90).view(64, 128)
        before = torch.cuda.memory_allocated()
        loss = model(ids, labels=ids).loss
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del loss
    inputs = 8192 * 32 * 4
    assert held[0] - held[1] >= (LAYERS - 1) * inputs
