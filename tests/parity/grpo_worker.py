"""Run every variant of the loss of sampled answers in many layouts inside one launched world.

Started by the tests as `torchrun --nproc-per-node N grpo_worker.py MODELS_DIR OUT_DIR LAYOUTS.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch
from ds_finetune.engine.engine import Engine
from ds_finetune.families.configs import VOCAB
from ds_finetune.model.loss.token_loss import LossHead
from ds_finetune.objectives.grpo import PolicyGradient
from ds_finetune.reference.selftest.cells import Cell
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import BETAS
from tests.parity.grpo_cells import (
    FORBIDDEN,
    LR,
    VARIANTS,
    Layout,
    Sampled,
    Variant,
    answers,
    answers_of,
    layout_tree,
    section,
)
from tests.parity.serving import Launched, serve

LogProbs = Mapping[int, np.ndarray]


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """A step of each variant in a layout, and then two steps that change the weights."""
    layout = Layout(**tree | {"cell": Cell(**tree["cell"])})
    with launched.engine(layout_tree(layout, launched.models / layout.cell.family, launched.out)) as engine:
        engine.allow_only(torch.tensor([token not in FORBIDDEN for token in range(VOCAB)]))
        return layout.name, _run(engine, layout)


def _run(engine: Engine, layout: Layout) -> dict[str, Any]:
    keeps = not layout.cell.has_lora
    if keeps:
        engine.keep_as_reference()
    every, found, moments = [(answer, 0.0) for answer in answers()], {"steps": []}, dict[str, torch.Tensor]()
    if layout.cell.has_lora:
        # After one step the second factors are no longer zeros.
        first = replace(VARIANTS[0], keys={}, groups=(0, 2))
        engine.step(_step(engine, first, {}, {}), lr=LR)
        moments = first_gradients(engine)
        found["adapters"] = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
    plain = _batch(engine, [_scored(answer, advantage) for answer, advantage in every])
    found["shares"] = any(micro.shared for micro in plain.micro)
    known, off = engine.token_log_probs([plain]), dict[int, np.ndarray]()
    if layout.cell.has_lora:
        off = engine.token_log_probs([plain], of_reference=True)
    for number in layout.variants:
        variant = VARIANTS[number]
        batch = _step(engine, variant, known, off)
        result = engine.step(batch, lr=0.0)
        # Adam's first moment is the running mean of the gradients of all steps.
        moments, before = first_gradients(engine), moments
        gradients = {name: moment - BETAS[0] * before.get(name, 0) for name, moment in moments.items()}
        step = {"loss": result.loss, "metrics": dict(result.metrics), "norm": result.grad_norm}
        found["steps"].append(step | {"gradients": gradients, "forwards": len(batch.micro)})
    found["logps"] = {number: part.tolist() for number, part in known.items()}
    found["off"] = {number: part.tolist() for number, part in off.items()}
    every_group = replace(VARIANTS[0], keys={}, groups=(0, 1, 2, 3))
    exact = engine.token_log_probs([_step(engine, every_group, {}, {})])
    scored = [replace(_scored(*given), old=exact[given[0].number]) for given in answers_of(every_group)]
    found["same"] = dict(engine.step(_batch(engine, scored), lr=0.0).metrics)
    # Two steps on one rollout: the second is off policy.
    on_policy = replace(VARIANTS[0], keys={}, groups=(0, 2))
    results = [
        engine.step(_step(engine, variant, known, {}), lr=LR)
        for variant in (on_policy, replace(on_policy, is_old=True))
    ]
    found |= {"ratios": [result.metrics["ratio"] for result in results]}
    return found | (_of_kept_weights(engine, plain, known) if keeps else {})


def _of_kept_weights(engine: Engine, batch: Batch, first: LogProbs) -> dict[str, bool]:
    """Whether the weights of the start compute the first bits again, and those of now other ones, as before."""
    before, kept, now = (engine.token_log_probs([batch], of_reference=is_kept) for is_kept in (False, True, False))

    def are_equal(one: LogProbs, other: LogProbs) -> bool:
        return all(np.array_equal(one[number], other[number]) for number in first)

    return {"kept": are_equal(kept, first), "moved": not are_equal(now, first), "restored": are_equal(now, before)}


def _step(engine: Engine, variant: Variant, known: LogProbs, reference: LogProbs) -> Batch:
    """The batch of a variant, whose loss the engine and the head compute from now on."""
    objective = PolicyGradient(section(variant))
    engine.objective = objective
    head = engine.lm.get_output_embeddings()
    assert isinstance(head, LossHead)
    head.objective = objective
    return _batch(engine, [_with_numbers(variant, *given, known, reference) for given in answers_of(variant)])


def _with_numbers(
    variant: Variant, answer: Sampled, advantage: float, known: LogProbs, reference: LogProbs
) -> ScoredAnswer:
    """An answer with log-probabilities near those of the first weights, or with adapters those of the model without."""
    scored = _scored(answer, advantage)
    if not known:
        return scored
    own = known[answer.number]
    return replace(
        scored,
        old=own + answer.old if variant.is_old else None,
        sampled=own + answer.sampled,
        reference=reference[answer.number] if reference else own + answer.reference,
    )


def _scored(answer: Sampled, advantage: float) -> ScoredAnswer:
    return ScoredAnswer(answer.prompt, answer.ids, advantage, answer.number)


def _batch(engine: Engine, given: Sequence[ScoredAnswer]) -> Batch:
    plan = replace(batch_plan(engine.plan, engine.objective), meets_each_forward=engine.plan.meets_each_forward)
    plan = replace(plan, streamed_row_cost=lambda row: float(row.num_tokens), shares_prompts=engine.shares_prompts)
    return answer_batch(given, plan)


if __name__ == "__main__":
    serve(run)
