"""Whole steps on packed rows with the kernels that torch.compile makes on a CPU, against transformers' operations."""

from typing import Any

import pytest
import torch
from torch import nn

from ds_finetune.model.activation_memory import recompute_layers
from ds_finetune.model.fused.install import install_fused
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import LossHead, TrainedModel, install_loss_head
from ds_finetune.model.parallel.expert import compute_shared_experts_ahead
from tests.model.fused.fused_kernels import fused_kernels
from tests.model.memory.test_kept_outputs import model_of

Documents = tuple[tuple[int, ...], ...]
PACKED: tuple[Documents, ...] = (((5, 9, 4), (12, 6)), ((7, 16), (20, 3)), ((3, 11, 8), (1, 21)))
"""The lengths of the documents in the rows of each step."""


def rows_of(documents: Documents) -> ForwardRows:
    tokens = sum(documents[0])
    ids = torch.arange(1, 1 + len(documents) * tokens).view(len(documents), tokens) % 90
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    return ForwardRows(ids, ids, positions, documents)


def steps(family: str, kernels: str, recomputation: str, *, has_lora: bool) -> list[list[torch.Tensor]]:
    """Losses and gradients of each step; the first makes the kernels, and others make none."""
    lm = model_of(family, has_lora=has_lora)
    install_loss_head(lm, kernel=lambda *given: chunked_cross_entropy(*given, chunk=8), objective=LossHead.objective)
    install_fused(lm, kernels)
    if recomputation != "none":
        recompute_layers(lm, is_selective=recomputation == "selective")
    compute_shared_experts_ahead(lm)
    model, found = TrainedModel(lm.train()), []
    for number, documents in enumerate(PACKED):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            loss = model(rows_of(documents)).loss
            loss.backward()
        found.append([loss.detach(), *_taken(model)])
    return found


def _taken(model: nn.Module) -> list[torch.Tensor]:
    """The gradients, which are removed."""
    found: list[Any] = [param.grad for param in model.parameters() if param.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recomputation", ["full", "selective", "none"])
@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v2"])
def test_steps_on_packed_rows_are_the_same(family: str, recomputation: str, has_lora: bool) -> None:
    fused_kernels("compile")
    wanted, found = (steps(family, name, recomputation, has_lora=has_lora) for name in ("torch", "compile"))
    for theirs, mine in zip(wanted, found, strict=True):
        assert len(theirs) == len(mine) > 1
        for a, b in zip(theirs, mine, strict=True):
            assert float((a - b).norm()) <= 2e-5 * float(a.norm()) + 1e-12
