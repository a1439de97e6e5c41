"""Collects the experts that routers choose for tokens, counts them over ranks and a step, and updates router biases."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from ds_finetune.foreign.guard import replaced
from ds_finetune.model.loss.forward_rows import ForwardRows, RealTokens
from ds_finetune.model.parallel.pipeline import MissingLayer
from ds_finetune.objectives.objective import UNKNOWN_EXPERTS
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.trained_parts import RouterPlan

_HASHES = 2**15


class RouterOutput(NamedTuple):
    """The logits and chosen experts that a layer's router returns for the tokens of the flattened rows."""

    logits: torch.Tensor
    """Router logits [tokens, experts]."""
    chosen: torch.Tensor
    """Indices of the chosen experts, int64 [tokens, chosen]."""


class RouterCollector:
    """Collects what this rank's routers return in each forward, and counts chosen experts over a step.

    Its hooks are installed after DeepSpeed's, so that ZeRO-3 gathers a router's weights for the gradient of its logits.
    """

    counts: torch.Tensor
    """How often each expert was chosen since `clear`, without padding tokens, int64 [layers, experts]."""
    entropy: torch.Tensor
    """Entropy (nats) of a token's normalised router scores, summed over tokens since `clear`, fp64 [layers]."""
    keeps_outputs: bool = False
    """Whether routers' outputs stay in memory after a forward: [tokens, experts] numbers per layer."""
    num_tokens: torch.Tensor
    """Number of tokens since `clear`, without padding, int64 scalar."""
    compared: torch.Tensor
    """For each layer, int64 [layers, 2]: sampled tokens that chose other experts than in sampling; compared tokens."""
    choice_hashes: NDArray[np.int16]
    """Hash of the set of chosen experts, for each layer and each token in the context `watch`, [tokens, layers]."""

    def __init__(self, lm: nn.Module, plan: RouterPlan, *, device: torch.device) -> None:
        self.plan, self._device = plan, device
        numbers = torch.Generator().manual_seed(0)
        self._expert_hashes = torch.randint(_HASHES, (plan.experts,), generator=numbers).to(device)
        self._expected: torch.Tensor | None = None
        self._outputs: dict[int, RouterOutput] = {}
        self._is_listening = self._is_counting = False
        self._tokens: RealTokens | None = None
        layers = {layer: lm.get_submodule(f"model.layers.{layer}") for layer in plan.layers}
        self.decoder_layers = {n: layer for n, layer in layers.items() if not isinstance(layer, MissingLayer)}
        self.modules = {n: layer.get_submodule(plan.kind.module) for n, layer in self.decoder_layers.items()}
        for layer, module in self.modules.items():
            module.register_forward_hook(partial(self._collect, layer))
        self.clear()

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of this rank's layers with a router, in the order of `counts`."""
        return tuple(self.modules)

    @property
    def outputs(self) -> tuple[RouterOutput, ...]:
        """Router outputs of the last forward for the balance loss, in the order of `layers`. `release` frees them."""
        return tuple(self._outputs[layer] for layer in self.modules if layer in self._outputs)

    @property
    def tokens(self) -> RealTokens:
        """The tokens of the last forward: which ones are not padding, and to which documents they belong."""
        assert self._tokens is not None, "no forward was listened to"
        return self._tokens

    def clear(self) -> None:
        """Reset all counts to zero."""
        size = (len(self.modules), self.plan.experts)
        self.counts = torch.zeros(size, dtype=torch.int64, device=self._device)
        self.entropy = torch.zeros(size[0], dtype=torch.float64, device=self._device)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self.compared = torch.zeros((size[0], 2), dtype=torch.int64, device=self._device)

    @contextmanager
    def watch(self, tokens: torch.Tensor | None) -> Iterator[None]:
        """Context of a forward that sets `choice_hashes` for `tokens`, indices in the flattened rows (None: all)."""
        listening, counting = replaced(self, "_is_listening", True), replaced(self, "_is_counting", False)
        with replaced(self, "keeps_outputs", True), listening, counting:
            yield
        chosen = torch.stack([output.chosen for output in self.outputs], dim=1)
        self.choice_hashes = self._hash(chosen if tokens is None else chosen[tokens]).cpu().numpy()
        self._outputs.clear()

    def _hash(self, chosen: torch.Tensor) -> torch.Tensor:
        """Hash sets of expert numbers, int64 [..., chosen], to int16 [...]. Probability of a collision: 1 / 32,768."""
        return (self._expert_hashes[chosen].sum(-1) % _HASHES).to(torch.int16)

    @contextmanager
    def listen(self, rows: ForwardRows, *, is_counting: bool, counts_tokens: bool = True) -> Iterator[None]:
        """Context that collects router outputs in a forward of `rows`. `is_counting` adds the chosen experts to
        `counts`. If `counts_tokens` is set too, the tokens are added to `num_tokens`. If the same rows have several
        forwards, only one sets `counts_tokens`.

        Backward runs outside of the context, so recomputed forwards are not collected.
        """
        assert rows.real is not None, "the rows do not say where padding begins"
        self._tokens = rows.real
        answers = None if rows.examples is None else rows.examples.answers
        self._expected = None if answers is None or answers.experts is None else answers.experts.flatten(0, 1)
        if is_counting and counts_tokens:
            self.num_tokens += self._tokens.is_real.sum()
        with replaced(self, "_is_listening", True), replaced(self, "_is_counting", is_counting):
            yield

    def release(self) -> None:
        """Free the router outputs of the last forward."""
        self._outputs.clear()
        self._tokens = None

    def _collect(self, layer: int, _: nn.Module, __: object, output: tuple[torch.Tensor, ...]) -> None:
        if not self._is_listening:
            return
        router_output = RouterOutput(output[0], output[2])
        if self._is_counting:
            self._count(self.layers.index(layer), router_output)
        if self.keeps_outputs and layer in self.plan.balanced:
            self._outputs[layer] = router_output

    @torch.no_grad()
    def _count(self, number: int, output: RouterOutput) -> None:
        logits, chosen = output
        is_real = self.tokens.is_real
        self.counts[number].index_add_(0, chosen.reshape(-1), is_real.long().repeat_interleave(chosen.shape[1]))
        probabilities = score_shares(logits, self.plan.kind.scores)
        entropy = -torch.xlogy(probabilities, probabilities).sum(-1, dtype=torch.float64)
        self.entropy[number] += entropy.masked_fill(~is_real, 0.0).sum()
        if self._expected is not None:
            expected = self._expected[:, number]
            is_known = expected != UNKNOWN_EXPERTS
            self.compared[number] += torch.stack([is_known & (self._hash(chosen) != expected), is_known]).sum(dim=1)


def score_shares(logits: torch.Tensor, scores: str) -> torch.Tensor:
    """Router scores of each token, divided by their sum, fp32 [tokens, experts]."""
    if scores == "softmax":
        return logits.float().softmax(dim=-1)
    values = functional.softplus(logits.float()).sqrt() if scores == "sqrtsoftplus" else logits.float().sigmoid()
    return values / values.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class RouterChoices:
    """The experts that the model's routers chose for a global batch. They are identical on all ranks.

    Tensors are on the CPU.
    """

    layers: tuple[int, ...]
    counts: torch.Tensor
    """How often each expert was chosen, without padding tokens, int64 [layers, experts]."""
    entropy: torch.Tensor
    """Entropy (nats) of a token's normalised router scores, averaged over tokens, fp64 [layers]."""
    num_tokens: int
    mismatch: float | None = None
    """Fraction of sampled tokens that chose other experts than in sampling, mean over layers; None if not compared."""


def table_of_choices(routers: RouterCollector, mesh: Mesh) -> torch.Tensor:
    """This rank's counts as a table, fp64 [layers of the model, experts + 4], which can be summed over all ranks.
    Columns are each expert's count, compared tokens that chose other experts than in sampling, all compared tokens, sum
    of the entropy, and number of tokens.
    """
    plan = routers.plan
    # fp64 counts exactly up to 2**53.
    table = torch.zeros(len(plan.layers), plan.experts + 4, dtype=torch.float64, device=routers.counts.device)
    if mesh.coordinate("tp") == 0:
        # Tensor parallel ranks count the same tokens, so one of them counts; pipeline stages count different layers.
        for number, layer in enumerate(routers.layers):
            row = table[plan.layers.index(layer)]
            row[:-4], row[-4:-2] = routers.counts[number], routers.compared[number]
            row[-2], row[-1] = routers.entropy[number], routers.num_tokens
    return table


def choices_of(table: torch.Tensor, plan: RouterPlan) -> RouterChoices:
    """Counts of chosen experts from a `table_of_choices` that was summed over all ranks and copied to the CPU."""
    tokens = table[:, -1].long()
    differing, compared = table[:, -4:-2].sum(dim=0).tolist()
    mismatch = differing / compared if compared else None
    entropy = table[:, -2] / tokens.clamp_min(1)
    return RouterChoices(plan.layers, table[:, :-4].long(), entropy, int(tokens[0]), mismatch)


def check_each_counted(choices: RouterChoices, plan: RouterPlan, *, num_tokens: int) -> None:
    """Assert that each router counted `plan.per_token` experts for each of the batch's `num_tokens` tokens."""
    counted = dict(zip(choices.layers, choices.counts.sum(dim=1).tolist(), strict=True))
    expected = dict.fromkeys(choices.layers, num_tokens * plan.per_token)
    assert counted == expected, (counted, expected)
    assert choices.num_tokens == num_tokens, (choices.num_tokens, num_tokens)


@torch.no_grad()
def update_biases(routers: RouterCollector, table: torch.Tensor) -> None:
    """Lower, by `router.bias_update`, the router biases of experts chosen more often than their layer's mean, and raise
    those of experts chosen less often, in fp32 (arXiv 2408.15664, algorithm 1).

    `table` has the counts of all ranks, on the device of the biases.
    """
    kind, rate = routers.plan.kind, routers.plan.section.bias_update
    assert kind.bias is not None
    for layer in (layer for layer in routers.plan.balanced if layer in routers.modules):
        counts = table[routers.plan.layers.index(layer), :-4].long()
        # Integers are compared, so that the sign is exactly 0 for an expert whose count is the mean.
        above = torch.sign(counts * len(counts) - counts.sum())
        bias = routers.decoder_layers[layer].get_buffer(kind.bias)
        assert bias.dtype == torch.float32, (layer, bias.dtype)
        bias -= rate * above.to(bias)
