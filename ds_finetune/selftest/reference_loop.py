"""The reference for every layout: a plain PyTorch training loop in one process on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ds_finetune.auto_models import AutoModelForCausalLM, AutoModelForSequenceClassification
from ds_finetune.engine.generation import GenerationLimits
from ds_finetune.labels import IGNORE_INDEX
from ds_finetune.objectives.distill import Distillation
from ds_finetune.objectives.objective import (
    DocumentLogProbs,
    DocumentObjective,
    Objective,
    ScoreObjective,
    TokenObjective,
)
from ds_finetune.plan.routers import RouterPlan
from ds_finetune.selftest.cells import SAMPLES, reference_log_probs, samples, targets, units
from ds_finetune.selftest.mismatched import all_reference_log_probs, mismatched_samples
from ds_finetune.selftest.plain_routers import PlainRouters
from ds_finetune.selftest.plain_teacher import soft_targets

SFT = TokenObjective("sft")
LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
PROMPTS = [ids[: 3 + 2 * number].tolist() for number, (ids, _) in enumerate(samples()[:5])]
LIMITS = GenerationLimits(max_new_tokens=3, stop_ids=[1], pad_id=0)


@dataclass
class Steps:
    """Results of some optimizer steps.

    Each step has a loss and a gradient norm before clipping. `gradients` are those of the first step after clipping
    (fp32 on the CPU), and `answers` greedy answers to `PROMPTS` after the last step. Of a model with routers, each step
    has the mean balance of documents and the choices of experts, int64 [layers, experts].
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    choices: list[torch.Tensor] = field(default_factory=list)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW without weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)


def auto_class(objective: Objective) -> Any:  # noqa: ANN401 - a class of transformers
    """The class that loads a model for the objective: one with a score of documents, or a language model."""
    return AutoModelForSequenceClassification if isinstance(objective, ScoreObjective) else AutoModelForCausalLM


def reference_loop(  # noqa: PLR0913
    folder: Path,
    *,
    steps: int,
    max_grad_norm: float = 0.0,
    optimizer: Callable[[nn.Module], Any] = adamw,
    objective: Objective = SFT,
    router: RouterPlan | None = None,
) -> Steps:
    """Take steps on all samples with the model that transformers loads from `folder`."""
    model = auto_class(objective).from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return reference_steps(model, steps, max_grad_norm, optimizer, objective=objective, router=router)


def reference_steps(  # noqa: PLR0913
    model: nn.Module,
    steps: int,
    max_grad_norm: float,
    optimizer: Callable[[nn.Module], Any],
    *,
    objective: Objective = SFT,
    router: RouterPlan | None = None,
) -> Steps:
    """Take steps on all samples, one unpadded sample per forward, with transformers' logits and torch's loss."""
    model.train()
    routers = None if router is None else PlainRouters(model, router)
    optim = optimizer(model)
    counts, results = _counts(objective), Steps()
    for _ in range(steps):
        loss = balance = 0.0
        baseline = _baseline(model, objective)
        for unit in units(objective.documents_per_unit):
            out = _unit_loss(model, unit, objective, counts, baseline=baseline)
            loss += out.item()
            if router is not None and routers is not None:
                of_documents = routers.take_loss() / counts["documents"]
                balance += of_documents.item() / len(router.layers)
                out = out + router.section.balance * of_documents
            out.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        results.losses.append(loss)
        results.norms.append(float(norm))
        results.gradients = results.gradients or {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optim.step()
        optim.zero_grad()
        if router is not None and routers is not None:
            results.balances.append(balance)
            results.choices.append(routers.take_counts())
            if router.section.bias_update:
                routers.update_biases(results.choices[-1])
    if not isinstance(objective, ScoreObjective):
        results.answers = [_answer(model, prompt) for prompt in PROMPTS]
    return results


def _counts(objective: Objective) -> dict[str, int]:
    """Units of all samples."""
    tokens = [int((labels != IGNORE_INDEX).sum()) for _, labels in samples()]
    whole = units(objective.documents_per_unit)
    return {
        "supervised_tokens": sum(tokens),
        "chosen_tokens": sum(tokens[::2]),
        "pairs": len(whole),
        "examples": len(whole),
        "documents": len(samples()),
    }


@torch.no_grad()
def _baseline(model: nn.Module, objective: Objective) -> float:
    """z0 of KTO over all samples, else 0."""
    if not objective.needs_baseline:
        return 0.0
    logps = [_log_probs(model, *sample).double().sum().item() for sample in mismatched_samples()]
    return objective.baseline(sum(logps) - float(all_reference_log_probs()[SAMPLES:].sum()), SAMPLES)


def _unit_loss(
    model: nn.Module, unit: Sequence[int], objective: Objective, counts: Mapping[str, int], *, baseline: float
) -> torch.Tensor:
    """The contribution of the samples of a unit to the mean loss over all samples (scalar)."""
    weights = torch.tensor([term.weight / counts[term.unit] for term in objective.terms], dtype=torch.float64)
    if isinstance(objective, ScoreObjective):
        rows = [torch.from_numpy(samples()[number][0]).long()[None] for number in unit]
        scores = torch.cat([model(input_ids=row, use_cache=False).logits.float() for row in rows])
        return objective.loss(scores, torch.from_numpy(targets()[[*unit]]), weights).loss
    if isinstance(objective, Distillation):
        return (
            torch.stack([_divergence(model, number, objective) for number in unit]).sum() / counts["supervised_tokens"]
        )
    logps = [_log_probs(model, *samples()[number]) for number in unit]
    if not isinstance(objective, DocumentObjective):
        return -torch.cat(logps).sum() / counts["supervised_tokens"]
    documents = DocumentLogProbs(
        logp=torch.stack([logp.double().sum() for logp in logps]),
        num_tokens=torch.tensor([float(len(logp)) for logp in logps], dtype=torch.float64),
        target=torch.from_numpy(targets()[[*unit]]),
        reference=torch.from_numpy(reference_log_probs()[[*unit]]),
    )
    return objective.loss(documents, weights, weights.new_tensor(baseline)).loss


def _log_probs(model: nn.Module, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """Log-probabilities of the supervised tokens of a sample in nats, fp32 [tokens]."""
    logits, wanted = _supervised_logits(model, ids, labels)
    return -functional.cross_entropy(logits, wanted, reduction="none")


def _divergence(model: nn.Module, number: int, objective: Distillation) -> torch.Tensor:
    """The loss of distillation, summed over the supervised tokens of a sample (scalar)."""
    return objective.whole_loss(
        *_supervised_logits(model, *samples()[number]), *soft_targets(objective.section)[number]
    )


def _supervised_logits(model: nn.Module, ids: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, fp32 [tokens, vocabulary], and labels, int64 [tokens], of the supervised tokens of a sample."""
    logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].float()
    wanted = torch.from_numpy(labels).long()
    is_supervised = wanted != IGNORE_INDEX
    return logits[is_supervised], wanted[is_supervised]


def _answer(model: Any, prompt: list[int]) -> list[int]:  # noqa: ANN401 - a causal LM
    ids, options = (
        torch.tensor([prompt]),
        {"max_new_tokens": LIMITS.max_new_tokens, "eos_token_id": LIMITS.stop_ids, "pad_token_id": LIMITS.pad_id},
    )
    with torch.no_grad():
        out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return [token for token in out[0, len(prompt) :].tolist() if token not in LIMITS.stop_ids]


def mean_loss(folder: Path, dtype: torch.dtype, objective: Objective = SFT) -> float:
    """Loss over the samples of the model that plain transformers loads from `folder`."""
    model = auto_class(objective).from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    counts = _counts(objective)
    with torch.no_grad():
        baseline = _baseline(model, objective)
        return sum(
            _unit_loss(model, unit, objective, counts, baseline=baseline).item()
            for unit in units(objective.documents_per_unit)
        )
