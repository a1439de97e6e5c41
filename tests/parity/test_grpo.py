"""The loss of sampled answers has the gradients of a plain loop over single answers, in every layout.

The loop runs the model of plain transformers on one prompt with its answer at a time, takes log_softmax of its logits
in fp64, and writes out each formula for one token.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.model.weights.names import weight_of
from tests.pairwise import in_threes, pairwise
from tests.parity.grpo_cells import FORBIDDEN, VARIANTS, Layout, Sampled, Variant, answers, answers_of, layouts, section
from tests.parity.reference import GRADIENT_TOLERANCE, asked_for, launch, relative

LORA_SCALE = 2.0


class Plain(NamedTuple):
    """Loss and gradients of a step of the plain loop."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


def _logps(model: Any, weights: Mapping[str, torch.Tensor], answer: Sampled) -> torch.Tensor:
    """The log-probability of each token of an answer under the model with these weights, fp64."""
    ids = torch.tensor([[*answer.prompt, *answer.ids]])
    logits = functional_call(model, dict(weights), kwargs={"input_ids": ids, "use_cache": False}).logits[0].double()
    logits[:, list(FORBIDDEN)] = -torch.inf
    here = logits.log_softmax(-1)[len(answer.prompt) - 1 : -1]
    return torch.stack([here[place, token] for place, token in enumerate(answer.ids)])


def _token_losses(
    keys: GrpoObjective,
    advantage: float,
    logp: torch.Tensor,
    old: torch.Tensor,
    sampled: torch.Tensor,
    ref: torch.Tensor,
) -> torch.Tensor:
    """The loss of each token of one answer."""
    rho, losses = (logp - old).exp(), []
    of_answer = (logp - old).mean().exp()
    for t in range(len(logp)):
        ratio = of_answer if keys.ratio == "sequence" else rho[t]
        if keys.ratio == "capped":
            assert keys.ratio_cap is not None
            gain = ratio.detach().clamp(max=keys.ratio_cap) * advantage * logp[t]
        else:
            clipped = ratio.clamp(1 - keys.clip_low, 1 + keys.clip_high)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            if keys.dual_clip is not None and advantage < 0:
                gain = gain.clamp(min=keys.dual_clip * advantage)
        d = ref[t] - logp[t]
        losses.append(-gain + keys.kl_weight * rho[t] * (d.exp() - d - 1))
    weights = torch.ones_like(rho)
    if keys.mismatch == "token":
        weights = (old - sampled).exp().clamp(max=keys.mismatch_cap)
    elif keys.mismatch == "geometric":
        weights = (old - sampled).mean().exp().clamp(max=keys.mismatch_cap).expand(len(logp))
    return torch.stack(losses) * weights


def _loss(variant: Variant, logps: Sequence[torch.Tensor], first: Mapping[int, torch.Tensor], off: Any) -> torch.Tensor:
    """The loss of a step from the log-probabilities of all answers, of which `first` are those of the first weights."""
    keys, losses = section(variant), []
    for answer, advantage in answers_of(variant):
        logp, own = logps[answer.number], first[answer.number]
        old = own + torch.from_numpy(answer.old) if variant.is_old else logp.detach()
        reference = off[answer.number] if off else own + torch.from_numpy(answer.reference)
        losses.append(_token_losses(keys, advantage, logp, old, own + torch.from_numpy(answer.sampled), reference))
    if keys.aggregation == "token":
        return torch.cat(losses).mean()
    if keys.aggregation == "sequence":
        return torch.stack([each.mean() for each in losses]).mean()
    assert keys.fixed_length is not None
    return torch.stack([each.sum() for each in losses]).mean() / keys.fixed_length


def _plain_loop(
    model: Any, trained: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], off: Any
) -> tuple[list[Plain], dict[int, torch.Tensor]]:
    """Loss and gradients of each variant, and the log-probabilities of all answers."""
    logps = [_logps(model, weights, answer) for answer in answers()]
    first = {number: logp.detach() for number, logp in enumerate(logps)}
    found = []
    for variant in VARIANTS:
        loss = _loss(variant, logps, first, off)
        gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        named = {name: grad for name, grad in zip(trained, gradients, strict=True) if grad is not None}
        found.append(Plain(loss.item(), named))
    return found, first


@cache
def _full(folder: Path) -> tuple[list[Plain], dict[int, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = dict(model.named_parameters())
    return _plain_loop(model, trained, trained, {})


def _with_adapters(
    folder: Path, adapters: Mapping[str, torch.Tensor]
) -> tuple[list[Plain], dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """With adapters merged into the weights, and the log-probabilities of the model without them, the reference."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = {name: tensor.clone().requires_grad_() for name, tensor in adapters.items()}
    base = dict(model.named_parameters())
    by_weight: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in trained.items():
        weight, side = weight_of(name)
        by_weight.setdefault(weight, {})[side] = tensor
    merged = {name: base[name] + LORA_SCALE * sides["B"] @ sides["A"] for name, sides in by_weight.items()}
    with torch.no_grad():
        off = {answer.number: _logps(model, base, answer) for answer in answers()}
    return *_plain_loop(model, trained, base | merged, off), off


def _assert_equals_plain_loop(layout: Layout, folder: Path, models: Path) -> None:
    result = torch.load(folder / f"{layout.name}.pt", weights_only=True)
    model, off = models / layout.cell.family, {}
    if layout.cell.has_lora:
        wanted, first, off = _with_adapters(model, result["adapters"])
    else:
        wanted, first = _full(model)
    for number, step in zip(layout.variants, result["steps"], strict=True):
        plain = wanted[number]
        # The mean of advantages is zero: a loss is small beside the losses of its tokens.
        assert step["loss"] == pytest.approx(plain.loss, rel=2e-5, abs=2e-6), number
        norm = torch.nn.utils.get_total_norm(list(plain.gradients.values()))
        assert step["norm"] == pytest.approx(float(norm), rel=GRADIENT_TOLERANCE), number
        assert step["gradients"].keys() == plain.gradients.keys(), number
        errors = {name: relative(step["gradients"][name], grad) for name, grad in plain.gradients.items()}
        assert max(errors.values()) < GRADIENT_TOLERANCE, (number, errors)
        if not VARIANTS[number].is_old:
            assert step["metrics"]["ratio"] == 1
            assert step["metrics"]["approx_kl"] == 0
    assert result["shares"] == layout.cell.packing
    if len(layout.variants) > 1:
        assert len({step["forwards"] for step in result["steps"]}) > 1
    for found, logps in ((result["logps"], first), (result["off"], off)):
        assert found.keys() == logps.keys()
        for number, logp in logps.items():
            assert found[number] == pytest.approx(logp.tolist(), abs=2e-5)
    # What is read before a step are the bits that it computes in the same rows.
    assert (result["same"]["ratio"], result["same"]["approx_kl"]) == (1, 0)
    # And the weights of the start compute the same bits after steps with others, which are the same afterwards.
    assert all(result.get(name, layout.cell.has_lora) for name in ("kept", "moved", "restored"))
    on_policy, later = result["ratios"]
    assert on_policy == 1
    assert later != 1


def _axes(layout: Layout) -> tuple[Hashable, ...]:
    cell = layout.cell
    kind = (cell.family, cell.layout, cell.stage, cell.packing, cell.accumulation)
    return (*kind, cell.has_lora, cell.offload, cell.reduces_once, layout.world)


ALL = layouts(worlds=(1, 2, 3, 4))
CHOSEN = pairwise([layout for layout in ALL if layout.world < 4], _axes)
"""Every two values of two axes."""
REST = [layout for layout in in_threes(ALL, _axes) if layout not in CHOSEN]
"""Every three values of three axes, up to four ranks."""


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [(layout, layout.world) for layout in CHOSEN]
    return launch("grpo_worker.py", runs, models, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="session")
def rest(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [(layout, layout.world) for layout in asked_for(request, REST)]
    return launch("grpo_worker.py", runs, models, tmp_path_factory.mktemp("grpo-rest"))


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_answers_equal_plain_loop(layout: Layout, results: Path, models: Path) -> None:
    _assert_equals_plain_loop(layout, results, models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=lambda layout: layout.name)
def test_answers_equal_plain_loop_in_other_layouts(layout: Layout, rest: Path, models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, models)
