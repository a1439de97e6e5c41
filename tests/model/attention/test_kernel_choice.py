"""The attention kernel follows from the GPU of this rank."""

import pytest
import torch
from transformers import AutoConfig

from ds_finetune.errors import ModelError
from ds_finetune.model.attention.kernels import packs_documents

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
