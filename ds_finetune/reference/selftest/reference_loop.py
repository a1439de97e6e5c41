"""The reference loop for every parallel layout: an ordinary PyTorch training loop in one process on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ds_finetune.config.objectives import ObjectiveConfig, SftObjective, is_distillation, is_grpo
from ds_finetune.config.sections import MtpConfig
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.build.skeleton import FACTORIES
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.trained_parts import RouterPlan
from ds_finetune.reference.selftest.cells import (
    SAMPLES,
    all_reference_log_probs,
    answer_advantages,
    answer_log_probs,
    mismatched_samples,
    samples,
    targets,
    units,
)
from ds_finetune.reference.selftest.plain_features import (
    PlainAdapters,
    PlainMtp,
    PlainRouters,
    soft_targets,
    trained_name,
)
from ds_finetune.reference.selftest.plain_losses import (
    Answer,
    SampledTokens,
    answers_loss,
    distill_loss,
    sampled_loss,
    samples_per_unit,
    score_loss,
)

SFT = SftObjective()
LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
PROMPTS = [ids[: 3 + 2 * number].tolist() for number, (ids, _) in enumerate(samples()[:5])]
LIMITS = SamplingLimits(max_new_tokens=3, stop_ids=(1,))


@dataclass
class Steps:
    """Results of some optimizer steps.

    `losses` and `norms` (gradient norms before clipping) have one value per step. `gradients` are those of the first
    step after clipping, fp32 on the CPU; `later_gradients` are those of adapters in the second step. `answers` are
    greedy answers to `PROMPTS` after the last step. With routers, each step has the mean balance loss of documents, and
    the number of tokens routed to each expert, int64 [layers, experts]. With multi-token prediction, each step has its
    mean loss; if only the prediction layer learns from this loss, also that layer's gradient norm before clipping.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    choices: list[torch.Tensor] = field(default_factory=list)
    later_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    mtp_losses: list[float] = field(default_factory=list)
    mtp_norms: list[float] = field(default_factory=list)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW without weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)


@dataclass(frozen=True)
class _Problem:
    """What the reference loop optimises. `counts` are the numbers of units, documents and tokens. `reference` has fp64
    log-probabilities under the reference model: of the samples, then of the mismatched samples.
    """

    objective: ObjectiveConfig
    counts: Mapping[str, int]
    reference: np.ndarray


def reference_loop(  # noqa: PLR0913
    folder: Path,
    *,
    steps: int,
    max_grad_norm: float = 0.0,
    optimizer: Callable[[nn.Module], Any] = adamw,
    objective: ObjectiveConfig = SFT,
    router: RouterPlan | None = None,
    adapters: PlainAdapters | None = None,
    mtp: MtpConfig | None = None,
) -> Steps:
    """Take optimizer steps on all samples with the model that transformers loads from `folder`."""
    model = FACTORIES[task_of(objective)].from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    plain_mtp = None if mtp is None else PlainMtp(model, folder, mtp)
    if adapters is not None:
        adapters.freeze(model, task_of(objective))
    reference = _reference(model, objective)
    if adapters is not None:
        adapters.add(model, task_of(objective))
    return reference_steps(
        model, steps, max_grad_norm, optimizer, objective=objective, router=router, reference=reference, mtp=plain_mtp
    )


def _reference(model: nn.Module, objective: ObjectiveConfig) -> np.ndarray:
    """Log-probabilities under the reference model: computed with `model` if that is the reference, else made up."""
    if objective.reference_source != "adapters_off":
        return all_reference_log_probs()
    with torch.no_grad():
        all_samples = [*samples(), *(mismatched_samples() if "baseline" in objective.row.needs else ())]
        return np.array([_log_probs(model, *sample).double().sum().item() for sample in all_samples])


def reference_steps(  # noqa: PLR0913
    model: nn.Module,
    steps: int,
    max_grad_norm: float,
    optimizer: Callable[[nn.Module], Any],
    *,
    objective: ObjectiveConfig = SFT,
    router: RouterPlan | None = None,
    reference: np.ndarray | None = None,
    mtp: PlainMtp | None = None,
) -> Steps:
    """Take optimizer steps on all samples, one unpadded sample per forward pass, with transformers' logits."""
    model.train()
    routers = None if router is None else PlainRouters(model, router)
    optim = optimizer(model)
    problem = _Problem(objective, _counts(objective), all_reference_log_probs() if reference is None else reference)
    results = Steps()
    for _ in range(steps):
        loss = balance = 0.0
        baseline = _baseline(model, problem)
        for unit in units(samples_per_unit(objective)):
            out = _unit_loss(model, unit, problem, baseline=baseline)
            loss += out.item()
            if mtp is not None:
                out = out + mtp.loss(*samples()[unit[0]]) / problem.counts["supervised_tokens"]
            if router is not None and routers is not None:
                of_documents = routers.take_loss() / problem.counts["documents"]
                balance += of_documents.item() / len(router.balanced)
                out = out + router.section.balance * of_documents
            out.backward()
        results.losses.append(loss)
        _clip(model, max_grad_norm or float("inf"), results, mtp)
        _keep_gradients(model, results)
        optim.step()
        optim.zero_grad()
        if router is not None and routers is not None:
            results.balances.append(balance)
            results.choices.append(routers.take_counts())
            if router.section.bias_update:
                routers.update_biases(results.choices[-1])
    if objective.row.head != "scores":
        results.answers = [_answer(model, prompt) for prompt in PROMPTS]
    return results


def _clip(model: nn.Module, max_grad_norm: float, results: Steps, mtp: PlainMtp | None) -> None:
    auxiliary = [] if mtp is None else [*mtp.parameters_apart()]
    others = [param for param in model.parameters() if not any(param is other for other in auxiliary)]
    results.norms.append(float(torch.nn.utils.clip_grad_norm_(others, max_grad_norm)))
    if mtp is not None:
        results.mtp_losses.append(mtp.take_loss())
    if auxiliary:
        results.mtp_norms.append(float(torch.nn.utils.clip_grad_norm_(auxiliary, max_grad_norm)))


def _keep_gradients(model: nn.Module, results: Steps) -> None:
    if len(results.losses) > 2:
        return
    grads = {trained_name(name): param.grad for name, param in model.named_parameters() if param.grad is not None}
    saved = {name: grad.clone() for name, grad in grads.items() if len(results.losses) == 1 or is_adapter(name)}
    if len(results.losses) == 1:
        results.gradients = saved
    else:
        results.later_gradients = saved


def _counts(objective: ObjectiveConfig) -> dict[str, int]:
    tokens = [int((labels != IGNORE_INDEX).sum()) for _, labels in samples()]
    all_units = units(samples_per_unit(objective))
    return {
        "supervised_tokens": sum(tokens),
        "chosen_tokens": sum(tokens[::2]),
        "units": len(all_units),
        "documents": len(samples()),
    }


@torch.no_grad()
def _baseline(model: nn.Module, problem: _Problem) -> float:
    """KTO's z0: the mean log p - log p_reference of mismatched answers, at least 0; 0 for other objectives."""
    if "baseline" not in problem.objective.row.needs:
        return 0.0
    logps = [_log_probs(model, *sample).double().sum().item() for sample in mismatched_samples()]
    return max(0.0, float(np.mean(np.array(logps) - problem.reference[SAMPLES:])))


def _unit_loss(model: nn.Module, unit: Sequence[int], problem: _Problem, *, baseline: float) -> torch.Tensor:
    """Contribution of one answer, pair or text to the mean loss over all samples (scalar)."""
    objective, counts = problem.objective, problem.counts
    if objective.row.head == "scores":
        rows = [torch.from_numpy(samples()[number][0]).long()[None] for number in unit]
        scores = torch.cat([model(input_ids=row, use_cache=False).logits.float() for row in rows])
        return score_loss(objective, scores, targets()[[*unit]].tolist()) / counts["units"]
    if is_distillation(objective):
        logits, labels = _supervised_logits(model, *samples()[unit[0]])
        log_q, ids = soft_targets(objective)[unit[0]]
        loss = distill_loss(objective, logits.double(), labels, log_q.double(), ids)
        return loss / counts["supervised_tokens"]
    logps = [_log_probs(model, *samples()[number]) for number in unit]
    if objective.row.head == "tokens":
        return -logps[0].sum() / counts["supervised_tokens"]
    if is_grpo(objective):
        old, sampled, reference = torch.from_numpy(answer_log_probs(unit[0])).double()
        tokens = SampledTokens(logps[0].double(), old, sampled, reference, float(answer_advantages()[unit[0]]))
        return sampled_loss(objective, tokens, counts)
    answers = [
        Answer(logp.double().sum(), len(logp), float(problem.reference[number]), float(targets()[number]))
        for number, logp in zip(unit, logps, strict=True)
    ]
    cross_entropy = -objective.chosen_weight * answers[0].logp / counts["chosen_tokens"]
    return answers_loss(objective, answers, baseline) / counts["units"] + cross_entropy


def _log_probs(model: nn.Module, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    logits, targets = _supervised_logits(model, ids, labels)
    return -functional.cross_entropy(logits, targets, reduction="none")


def _supervised_logits(model: nn.Module, ids: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, fp32 [tokens, vocabulary], and labels, int64 [tokens], of the supervised tokens of a sample."""
    logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].float()
    targets = torch.from_numpy(labels).long()
    is_supervised = targets != IGNORE_INDEX
    return logits[is_supervised], targets[is_supervised]


def _answer(model: Any, prompt: list[int]) -> list[int]:  # noqa: ANN401 - a causal LM
    ids, ends = torch.tensor([prompt]), list(LIMITS.stop_ids)
    options = {"max_new_tokens": LIMITS.max_new_tokens, "eos_token_id": ends, "pad_token_id": 0}
    with torch.no_grad():
        out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return [token for token in out[0, len(prompt) :].tolist() if token not in LIMITS.stop_ids]


def mean_loss(
    folder: Path,
    dtype: torch.dtype,
    objective: ObjectiveConfig = SFT,
    *,
    base: tuple[Path, PlainAdapters] | None = None,
) -> float:
    """Load the model in `folder` with plain transformers, and return its mean loss over all samples. `base` has the
    folder and the adapters from which the run started, the reference model of some objectives.
    """
    kind = FACTORIES[task_of(objective)]
    model = of_reference = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    if base is not None and objective.reference_source == "adapters_off":
        of_reference = kind.from_pretrained(base[0], dtype=torch.float32, trust_remote_code=False)
        base[1].freeze(of_reference, task_of(objective))
    reference = _reference(of_reference, objective)
    problem = _Problem(objective, _counts(objective), reference)
    with torch.no_grad():
        baseline = _baseline(model, problem)
        return sum(
            _unit_loss(model, unit, problem, baseline=baseline).item() for unit in units(samples_per_unit(objective))
        )
