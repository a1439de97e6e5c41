"""Choices of experts in a step, added up over all ranks, and the update of biases that follows from them."""

from dataclasses import dataclass

import torch

from ds_finetune.model.experts.routers import RouterCollector
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.routers import RouterPlan


@dataclass(frozen=True)
class RouterChoices:
    """What all routers of the model chose for the tokens of a global batch, the same on every rank.

    Tensors are on the CPU.
    """

    layers: tuple[int, ...]
    """Numbers of the layers that have a router."""
    counts: torch.Tensor
    """How often each expert was chosen, int64 [layers, experts]; padding is not counted."""
    entropy: torch.Tensor
    """Mean over tokens of the entropy in nats of the shares of the scores, fp64 [layers]."""
    num_tokens: int


def table_of_choices(routers: RouterCollector, mesh: Mesh) -> torch.Tensor:
    """What this rank's routers counted, fp64 [layers of the model, experts + 2]: choices of experts, the sum of the
    entropy, and tokens. The sum over all ranks has every choice once.
    """
    plan = routers.plan
    # Counts are exact in fp64 up to 2**53.
    table = torch.zeros(len(plan.layers), plan.experts + 2, dtype=torch.float64, device=routers.counts.device)
    if mesh.place("tp") == 0:
        # Tensor parallel ranks count the same tokens, pipeline stages other layers.
        for layer, counts, entropy in zip(routers.layers, routers.counts, routers.entropy, strict=True):
            row = table[plan.layers.index(layer)]
            row[:-2], row[-2], row[-1] = counts, entropy, routers.num_tokens
    return table


def choices_of(table: torch.Tensor, plan: RouterPlan) -> RouterChoices:
    """The choices in such a table of all ranks, which is on the CPU."""
    counts, tokens = table[:, :-2].long(), table[:, -1].long()
    return RouterChoices(plan.layers, counts, table[:, -2] / tokens.clamp_min(1), int(tokens[0]))


def check_each_counted(choices: RouterChoices, plan: RouterPlan, *, num_tokens: int) -> None:
    """Each router of the model saw each of the `num_tokens` tokens of the global batch once, and chose the same number
    of experts for it.
    """
    found = dict(zip(choices.layers, choices.counts.sum(dim=1).tolist(), strict=True))
    wanted = dict.fromkeys(choices.layers, num_tokens * plan.per_token)
    assert found == wanted, (found, wanted)
    assert choices.num_tokens == num_tokens, (choices.num_tokens, num_tokens)


def finish_step(
    routers: RouterCollector, choices: RouterChoices, table: torch.Tensor, *, num_tokens: int, is_skipped: bool
) -> None:
    """Check `choices` of the `num_tokens` tokens of the global batch; biases are updated by them unless the step was
    skipped. `table` has the same numbers on the device.
    """
    check_each_counted(choices, routers.plan, num_tokens=num_tokens)
    if routers.plan.section.bias_update and not is_skipped:
        update_biases(routers, table)


@torch.no_grad()
def update_biases(routers: RouterCollector, table: torch.Tensor) -> None:
    """Lower the bias of each expert with more choices than the mean of its layer by `router.bias_update`, and raise
    that of each expert with fewer (arXiv 2408.15664, algorithm 1); in fp32. `table` is that of all ranks, on the device
    of the biases.
    """
    kind, rate = routers.plan.kind, routers.plan.section.bias_update
    assert kind.bias is not None
    for layer, module in routers.modules.items():
        counts = table[routers.plan.layers.index(layer), :-2].long()
        # In integers, so that a load equal to the mean moves nothing.
        above = torch.sign(counts * len(counts) - counts.sum())
        bias = module.get_buffer(kind.bias)
        assert bias.dtype == torch.float32, (layer, bias.dtype)
        bias -= rate * above.to(bias)
