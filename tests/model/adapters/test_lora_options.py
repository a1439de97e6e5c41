"""Options of adapters are those of peft: losses of three steps, and weights after them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.configs import VOCAB
from ds_finetune.model.activation_memory import recompute_layers
from ds_finetune.model.adapters.lora import factors_of
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.reference.selftest.cells import hf_config
from ds_finetune.reference.selftest.reference_loop import adamw
from tests.lora_twin import adapted, base_model, in_peft, write_adapter_of

STEPS = 3
EPSILON = torch.finfo(torch.float32).eps
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("qwen3", {"rslora": True}),
    "dropout": ("qwen3", {"dropout": 0.3}),
    "modules to save": ("qwen3", {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "latent attention": (
        "deepseek_v3",
        {
            "dropout": 0.3,
            "rslora": True,
            "target_modules": [r".*\.self_attn\..*_proj(_with_mqa)?"],
            "modules_to_save": ["input_layernorm"],
        },
    ),
}


def _steps(model: Any, *, seeds: int = 0) -> list[float]:
    """The losses of some steps in training mode, with the same random numbers for each model."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = adamw(model.train())
    assert trained
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, VOCAB, (3, 17), generator=torch.Generator().manual_seed(step))
        torch.manual_seed(seeds + step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that a model would have with its adapters merged."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}


@pytest.mark.parametrize("option", OPTIONS)
def test_losses_and_weights_of_three_steps_are_those_of_peft(option: str, tmp_path: Path) -> None:
    family, given = OPTIONS[option]
    lora = LoraConfig(rank=8, alpha=32, **given)
    base = base_model(family)
    ours = adapted(copy.deepcopy(base), lora)
    write_adapter_of(ours, lora, tmp_path / "adapter", base=tmp_path)
    theirs = in_peft(copy.deepcopy(base), tmp_path / "adapter", trainable=True)
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == plan_lora(base.config, lora).num_params
    wanted = _steps(theirs)
    assert _steps(ours) == pytest.approx(wanted, abs=16 * EPSILON * max(wanted))
    plain = _steps(adapted(copy.deepcopy(base), LoraConfig(rank=8, alpha=32, target_modules=lora.target_modules)))
    assert plain != pytest.approx(wanted, abs=1e-4), "the option does nothing"
    adapters = {name: param.detach() for name, param in ours.named_parameters() if is_adapter(name)}
    factors = factors_of(adapters, lora.scale)
    merged = _weights(theirs.merge_and_unload())
    for name, tensor in _weights(ours).items():
        own = tensor + factors[name].delta(0, tensor.numel()).view_as(tensor) if name in factors else tensor
        # Three steps of Adam move a weight by three times its rate at most; a part in a thousand may be a rounding's.
        assert torch.allclose(own, merged[name], atol=3e-6, rtol=1e-5), name


@pytest.mark.parametrize("is_selective", [False, True])
def test_recomputed_layers_drop_the_same_inputs(is_selective: bool) -> None:
    lora = LoraConfig(rank=8, alpha=32, dropout=0.3)
    kept, again = (adapted(base_model("qwen3"), lora) for _ in range(2))
    recompute_layers(again, is_selective=is_selective)
    assert _steps(again) == _steps(kept)
    found = dict(again.named_parameters())
    assert all(torch.equal(param, found[name]) for name, param in kept.named_parameters())


def test_nothing_is_dropped_in_evaluation() -> None:
    model, ids = adapted(base_model("qwen3"), LoraConfig(rank=8, dropout=0.5)), torch.arange(3, 20)[None]
    plain = adapted(base_model("qwen3"), LoraConfig(rank=8)).eval()
    assert torch.equal(model.eval()(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert not torch.equal(model.train()(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("family", "given", "said"),
    [
        ("deepseek_v3", {"dropout": 0.1}, "no dropout for adapters of down_proj, experts, gate_proj, up_proj"),
        ("deepseek_v3", {"modules_to_save": ["experts"]}, "experts.gate_up_proj, whose weights have adapters"),
        (
            "deepseek_v3",
            {"modules_to_save": ["experts"], "target_modules": ["o_proj"]},
            "weights no test trains in full beside",
        ),
        ("qwen3", {"modules_to_save": ["o_proj"]}, "o_proj.weight, whose weights have adapters"),
        ("qwen3", {"modules_to_save": ["lm_haed"]}, "`lm_haed` matches no module"),
        ("qwen3", {"modules_to_save": ["("]}, "is not a regular expression"),
    ],
)
def test_what_cannot_be_is_one_error(family: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        plan_lora(hf_config(family), LoraConfig(rank=8, **given))
    assert refused.value.hint
    assert "haed" not in said or "lm_head" in refused.value.hint


def test_an_embedding_that_is_the_head_is_not_trained_whole() -> None:
    config = hf_config("qwen3")
    config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match="has the embedding, which is also"):
        plan_lora(config, LoraConfig(rank=8, modules_to_save=("embed_tokens",)))
