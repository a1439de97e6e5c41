"""Adapters: which modules have them, that they are peft's numbers in forward and backward, and what they add to weights."""

import copy
from pathlib import Path

import pytest
import torch

from ds_finetune.config import LoraConfig
from ds_finetune.model.lora import is_adapter
from ds_finetune.selftest.cells import VOCAB
from tests.lora_twin import NAMED, adapted, base_model, by_our_names, in_peft, write_adapter_of

LORA = LoraConfig(rank=8, alpha=32)
FAMILIES = ("deepseek_v3", "deepseek_v2", "llama", "qwen2", "qwen3")


def _ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 17), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("family", "patterns"), [*((family, None) for family in FAMILIES), ("deepseek_v3", NAMED), ("deepseek_v2", NAMED)])
def test_forward_and_gradients_are_those_of_peft(family: str, patterns: tuple[str, ...] | None, tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"target_modules": patterns})
    base = base_model(family)
    base.save_pretrained(tmp_path / "base")
    ours = adapted(copy.deepcopy(base), lora)
    write_adapter_of(ours, lora, tmp_path / "adapter", base=tmp_path / "base")
    theirs = in_peft(base, tmp_path / "adapter", trainable=True)
    logits = [model(input_ids=_ids(), use_cache=False).logits for model in (ours, theirs)]
    assert torch.allclose(*logits, atol=1e-5, rtol=0)
    for each in logits:
        each.logsumexp(-1).square().mean().backward()
    gradients = {name: param.grad for name, param in ours.named_parameters() if param.grad is not None}
    assert gradients.keys() == {name for name, _ in ours.named_parameters() if is_adapter(name)}
    peft_gradients = {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}
    wanted = by_our_names(peft_gradients, gradients)
    assert len(peft_gradients) == len(wanted)
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() <= 1e-4 * wanted[name].norm(), name
        assert gradient.norm() > 0, name
