"""The head in 16 bits: its softmax in blocks, and its weight's gradient in fp32."""

import pytest
import torch
from torch.nn import functional

from ds_finetune.model.loss import head_chunks
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.head_chunks import HeadGradients, HeadInputs, NeededGradients

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def _head(tokens: int = 50, vocabulary: int = 300, width: int = 32) -> HeadInputs:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, width, generator=generator).bfloat16() for size in (tokens, vocabulary))
    bias = torch.randn(vocabulary, generator=generator).bfloat16()
    return HeadInputs(hidden, weight, bias, torch.randint(0, vocabulary, (tokens,), generator=generator))


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_blocks_change_no_number(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Rows of a chunk are independent; only the bias adds them up, in fp32."""
    head, needed = _head(), NeededGradients(hidden=True, weight=True, bias=True)
    whole = chunked_cross_entropy(head, needed, chunk=20)
    monkeypatch.setattr(head_chunks, "_BLOCK_NUMBERS", rows * len(head.weight) // torch.get_num_threads())
    parts = chunked_cross_entropy(head, needed, chunk=20)
    *found, d_bias = parts.sums, *parts.gradients
    *wanted, wanted_bias = whole.sums, *whole.gradients
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    torch.testing.assert_close(d_bias, wanted_bias, rtol=1e-5, atol=1e-6)


def test_in_bf16_it_equals_the_plain_loss_of_the_same_logits() -> None:
    hidden, weight, bias, targets, _ = head = _head()
    logits = ((hidden @ weight.T).float() + bias).requires_grad_()
    wanted = functional.cross_entropy(logits, targets, reduction="sum")
    (d_logits,) = torch.autograd.grad(wanted, logits)
    loss, sums, found, _ = chunked_cross_entropy(head, NeededGradients(True, True, True), chunk=20)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert sums.tolist() == [loss.item(), (logits.argmax(-1) == targets).sum().item()]
    assert found.d_weight is not None
    assert found.d_bias is not None
    assert found.d_hidden is not None
    assert found.d_weight.dtype == torch.float32
    assert torch.linalg.norm(found.d_weight - d_logits.T @ hidden.float()) < 4e-3 * torch.linalg.norm(found.d_weight)
    assert torch.linalg.norm(found.d_hidden - d_logits @ weight.float()) < 4e-3 * torch.linalg.norm(found.d_hidden)
    torch.testing.assert_close(found.d_bias, d_logits.sum(0), rtol=1e-4, atol=1e-5)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_are_added_in_fp32_on_gpus(dtype: torch.dtype) -> None:
    """Nearer to the exact sum than products that are rounded first, whose error is 2**-9."""
    hidden, weight, *_ = (tensor.cuda() for tensor in _head(tokens=512, vocabulary=256, width=64) if tensor is not None)
    part, d_logits = hidden.to(dtype), torch.randn(512, 256, device="cuda").to(dtype)
    inputs = HeadInputs(part, weight, None, torch.zeros(512, dtype=torch.int64))
    gradients = HeadGradients.zeros(inputs, NeededGradients(hidden=False, weight=True, bias=False))
    for _ in range(2):
        gradients.add_products(d_logits, part, weight.to(dtype), 0)
    exact = 2 * d_logits.double().T @ part.double()
    assert gradients.d_weight is not None
    assert torch.linalg.norm(gradients.d_weight - exact) < 1e-5 * torch.linalg.norm(exact)
