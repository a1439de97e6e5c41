"""The attention kernel follows from the GPU of this rank."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import attention
from transformers import AutoConfig

from ds_finetune.errors import DependencyError, ModelError
from ds_finetune.model.attention import kernels
from ds_finetune.model.attention.kernels import choose_flash_attention, packs_documents, problem_of_flash_3
from ds_finetune.plan.forward import attention_lines
from ds_finetune.plan.model_tensors import DescribedModel, ModelTensors

CONFIG = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2)


def test_a_cpu_attends_document_by_document() -> None:
    assert not packs_documents("sdpa", CONFIG, device="cpu", precision="bf16")
    with pytest.raises(ModelError, match="with model_type `llama` on cpu: its kernel runs only on GPUs"):
        packs_documents("varlen", CONFIG, device="cpu", precision="bf16")


@pytest.mark.parametrize(("capability", "is_taken"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_takes_all_documents_at_once_where_it_has_the_kernel(
    capability: tuple[int, int], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert packs_documents("sdpa", CONFIG, device="cuda", precision="fp16") is is_taken
    assert not packs_documents("by_document", CONFIG, device="cuda", precision="fp16")
    assert not packs_documents("eager", CONFIG, device="cuda", precision="fp16")
    if is_taken:
        assert packs_documents("varlen", CONFIG, device="cuda", precision="fp16")
        return
    with pytest.raises(ModelError) as caught:
        packs_documents("varlen", CONFIG, device="cuda", precision="fp16")
    assert caught.value.message.endswith("on a GPU: compute capability 7.5, and the kernel needs 8.0")
    assert caught.value.hint == "set model.attention: sdpa, which attends document by document there"


def _install(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], load: Callable[[], object]) -> None:
    """A GPU, and a FlashAttention 3 that torch loads by `load`."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA3", load)  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "find_spec", lambda _: object())


def _line(config: Any) -> str:
    problem = problem_of_flash_3(config)
    model = DescribedModel(config.to_dict(), lambda: ModelTensors({}))
    [(_, text)] = attention_lines("sdpa", model, device="cuda", precision="bf16", flash_3=problem)
    return text


def test_flash_attention_3_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[bool] = []
    _install(monkeypatch, (9, 0), lambda: SimpleNamespace(remove=lambda: removed.append(True)))
    choose_flash_attention(CONFIG, is_wanted=True)
    assert attention.current_flash_attention_impl() == "FA3"
    assert _line(CONFIG) == "one call for all documents, by FlashAttention 3"
    # The next run of this process.
    choose_flash_attention(CONFIG, is_wanted=False)
    assert attention.current_flash_attention_impl() is None
    assert removed == [True]


DROPOUT = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2, attention_dropout=0.1)


@pytest.mark.parametrize(
    ("capability", "config", "is_installed", "text"),
    [
        ((8, 0), CONFIG, True, "FlashAttention 3 is for compute capability 9.x"),
        ((10, 0), CONFIG, True, "FlashAttention 3 is for compute capability 9.x"),
        ((9, 0), DROPOUT, True, "FlashAttention 3 has no dropout, and the attention has 0.1"),
        ((9, 0), CONFIG, False, "FlashAttention 3 needs a torch that takes it, and its module flash_attn_interface"),
    ],
)
def test_flash_attention_2_is_kept_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], config: Any, is_installed: bool, text: str
) -> None:
    _install(monkeypatch, capability, lambda: pytest.fail("it was loaded"))
    if not is_installed:
        monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    choose_flash_attention(config, is_wanted=True)
    assert _line(config) == f"one call for all documents, by FlashAttention 2: {text}"


def test_a_flash_attention_3_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("undefined symbol: aoti_torch_abi_version")

    _install(monkeypatch, (9, 0), load)
    with pytest.raises(DependencyError, match="installed and cannot be loaded: undefined symbol") as caught:
        choose_flash_attention(CONFIG, is_wanted=True)
    assert "or uninstall it" in caught.value.hint
