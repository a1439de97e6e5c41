"""Choices of experts are summed only where each router was seen to choose for every token once."""

import pytest
import torch
from torch import nn

from ds_finetune.config.sections import RouterConfig
from ds_finetune.families.family import RouterKind
from ds_finetune.model.loss.forward_rows import ForwardRows, RealTokens
from ds_finetune.model.routers import RouterCollector, check_each_counted, choices_of, table_of_choices
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.trained_parts import RouterPlan

PLAN = RouterPlan(RouterKind("softmax", module="gate"), layers=(0, 1), experts=4, per_token=2, section=RouterConfig())


class Gate(nn.Module):
    """Chooses two of four experts for each token."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits, weights and numbers of experts."""
        found = tokens.topk(2)
        return tokens, found.values, found.indices


@pytest.mark.parametrize("calls", [(1, 1), (1, 0), (2, 1)])
def test_every_router_has_to_count_every_token_once(calls: tuple[int, int]) -> None:
    layers = nn.ModuleList([nn.ModuleDict({"gate": Gate()}) for _ in PLAN.layers])
    lm = nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})
    collector = RouterCollector(lm, PLAN, device=torch.device("cpu"))
    ids = torch.zeros(1, 6, dtype=torch.int64)
    real = RealTokens(torch.tensor([0, 0, 0, 0, 0, 1]), torch.tensor([5]))
    with collector.listen(ForwardRows(ids, ids, ids, real=real), is_counting=True):
        for layer, times in zip(PLAN.layers, calls, strict=True):
            for _ in range(times):
                collector.modules[layer](torch.randn(6, 4))
    table = table_of_choices(collector, Mesh(0, 1))
    choices = choices_of(table, PLAN)
    if calls != (1, 1):
        with pytest.raises(AssertionError, match=r"\{0: 10, 1: 10\}"):
            check_each_counted(choices, PLAN, num_tokens=5)
        return
    check_each_counted(choices, PLAN, num_tokens=5)
    assert (choices.num_tokens, choices.counts.sum(dim=1).tolist()) == (5, [10, 10])
