"""Choices of experts in a step, added up over all ranks, and the update of biases that follows from them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_finetune.model.routers import RouterCollector
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


def sum_choices(routers: RouterCollector, mesh: Mesh) -> RouterChoices:
    """The choices that the collectors of all ranks counted, in one reduction; collective."""
    plan = routers.plan
    # Counts are exact in fp64 up to 2**53.
    table = torch.zeros(len(plan.layers), plan.experts + 2, dtype=torch.float64, device=routers.counts.device)
    if mesh.place("tp") == 0 and routers.layers:
        # Tensor parallel ranks count the same tokens, pipeline stages other layers.
        here = torch.tensor([plan.layers.index(layer) for layer in routers.layers], device=table.device)
        tokens = routers.num_tokens.double().expand(len(here))
        table[here] = torch.cat([routers.counts.double(), routers.entropy[:, None], tokens[:, None]], dim=1)
    dist.all_reduce(table)
    table = table.cpu()
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


def finish_step(routers: RouterCollector, mesh: Mesh, *, num_tokens: int, is_skipped: bool) -> RouterChoices:
    """The choices of the step for the `num_tokens` tokens of the global batch; biases are updated by them unless it was
    skipped. Collective.
    """
    choices = sum_choices(routers, mesh)
    check_each_counted(choices, routers.plan, num_tokens=num_tokens)
    if routers.plan.section.bias_update and not is_skipped:
        update_biases(routers, choices)
    return choices


@torch.no_grad()
def update_biases(routers: RouterCollector, choices: RouterChoices) -> None:
    """Lower the bias of each expert with more choices than the mean of its layer by `router.bias_update`, and raise
    that of each expert with fewer (arXiv 2408.15664, algorithm 1); in fp32.
    """
    kind, rate = routers.plan.kind, routers.plan.section.bias_update
    assert kind.bias is not None
    for layer, module in routers.modules.items():
        counts = choices.counts[choices.layers.index(layer)]
        # In integers, so that a load equal to the mean moves nothing.
        above = torch.sign(counts * len(counts) - counts.sum())
        bias = module.get_buffer(kind.bias)
        assert bias.dtype == torch.float32, (layer, bias.dtype)
        bias -= rate * above.to(bias)
