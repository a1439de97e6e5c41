"""The chunked loss equals the plain one, and packed documents do not see each other."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig

from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import LossHead, TrainedModel, install_loss_head
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.objectives.labels import IGNORE_INDEX
from tests.model.tiny import CONFIGS
from tests.rounding import differing_gradients, rounding_of_outputs


def head_of(width: int, vocabulary: int, *, bias: bool, chunk: int) -> LossHead:
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=bias)
    head.__class__ = LossHead
    assert isinstance(head, LossHead)
    head.kernel = partial(chunked_cross_entropy, chunk=chunk)
    return head


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_loss_and_gradients_equal_cross_entropy(chunk: int, bias: bool, cap: float | None) -> None:
    head = head_of(16, 50, bias=bias, chunk=chunk)
    head.cap = cap
    hidden = torch.randn(3, 11, 16, requires_grad=True)
    labels = torch.randint(0, 50, (3, 11))
    labels[0, :6] = IGNORE_INDEX
    found = head(hidden, labels)
    (found.loss / 7).backward()
    ours = [hidden.grad.clone(), *(p.grad.clone() for p in head.parameters())]  # type: ignore[union-attr]
    hidden.grad = None
    head.zero_grad()
    logits = head(hidden)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    wanted = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    (wanted / 7).backward()
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for mine, theirs in zip(ours, [hidden.grad, *(p.grad for p in head.parameters())], strict=True):
        assert torch.linalg.norm(mine - theirs) / torch.linalg.norm(theirs) < 1e-5
    assert found.sums[1].item() == (logits.argmax(-1) == labels).sum().item()


def test_nothing_supervised_gives_zero_and_zero_gradients() -> None:
    head = head_of(8, 20, bias=False, chunk=4)
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    found = head(hidden, torch.full((2, 3), IGNORE_INDEX))
    found.loss.backward()
    assert found.loss.item() == found.sums[1].item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))  # type: ignore[arg-type]
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))  # type: ignore[arg-type]


def test_a_frozen_head_gets_no_gradient_and_hidden_still_does() -> None:
    head = head_of(8, 20, bias=False, chunk=4)
    head.weight.requires_grad_(requires_grad=False)
    hidden = torch.randn(5, 8, requires_grad=True)
    head(hidden, torch.randint(0, 20, (5,))).loss.backward()
    assert head.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def tiny_model(family: str, attention: str) -> TrainedModel:
    lm = build_skeleton(
        AutoConfig.for_model(family, **CONFIGS[family]), attention=attention, dtype=torch.float32, device="cpu"
    )
    initialise_weights(lm, seed=0)
    install_loss_head(lm)
    return TrainedModel(lm)


def documents() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    first, second = torch.randint(3, 96, (9,)), torch.randint(3, 96, (6,))
    positions = torch.cat([torch.arange(9), torch.arange(6)])[None]
    labels = torch.cat([first[1:], torch.tensor([IGNORE_INDEX]), second[1:], torch.tensor([IGNORE_INDEX])])[None]
    return first, second, positions, labels


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, kind)
        for family in CONFIGS
        for kind in ("sdpa", "eager")
        if kind == "sdpa" or not (FAMILIES[family].has_sinks or FAMILIES[family].has_state)
    ],
)
def test_packed_documents_do_not_see_each_other(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    first, second, positions, _ = documents()
    with torch.no_grad():
        seen = [
            model.hidden(torch.cat([other, second])[None], positions, ((9, 6),))[0, 9:] for other in (first, 98 - first)
        ]
    # Other tokens elsewhere give the experts other group sizes, and so another order of summation; nothing else may
    # change.
    limit = rounding_of_outputs(model.config, seen[0], tokens=9)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=limit if "experts" in str(model) else 0)


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_gradient_is_the_sum_of_separate_ones(family: str) -> None:
    first, second, positions, labels = documents()
    packed, apart = tiny_model(family, "sdpa"), tiny_model(family, "sdpa")
    together = packed(ForwardRows(torch.cat([first, second])[None], positions, labels, ((9, 6),))).loss
    together.backward()
    total = 0.0
    for ids, own in ((first, labels[:, :9]), (second, labels[:, 9:])):
        loss = apart(ForwardRows(ids[None], torch.arange(len(ids))[None], own)).loss
        loss.backward()
        total += loss.item()
    assert together.item() == pytest.approx(total, rel=1e-6)
    found, wanted = (
        {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        for model in (packed, apart)
    )
    assert all("indexer" in name for name, _ in packed.named_parameters() if name not in found)
    # Each of a layer's sums is taken forward, for the gradient of its input, and for that of its weights.
    additions = 3 * packed.config.num_hidden_layers * (8 * packed.config.hidden_size + len(labels[0]))
    assert not differing_gradients(found, wanted, additions=additions)
