"""Samples answers to prompts, which are distributed over the ranks, in batches as large as memory allows."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ds_finetune.engine.answer_weights import least_free_bytes, weights_for_answers
from ds_finetune.engine.sampling.answer_model import AnswerModel
from ds_finetune.engine.sampling.answers import SampledAnswer, SamplingRequest
from ds_finetune.engine.sampling.batch import BatchOfAnswers, Drawing, PromptPart
from ds_finetune.engine.sampling.cache_check import check_cache
from ds_finetune.engine.sampling.row_cache import token_bytes
from ds_finetune.features.routers import BalanceLoss
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.plan.forward import rows_of_batch
from ds_finetune.plan.plan import Plan


def sample_prompts(
    wrapped: Any,  # noqa: ANN401 - a DeepSpeedEngine
    plan: Plan,
    tp_group: TensorParallelGroup | None,
    request: SamplingRequest,
) -> dict[int, SampledAnswer] | None:
    """Answers to this rank's prompts by their places among all answers; None where it is over before a batch."""
    assert request.prompts, "there are no prompts to sample"
    answers, device = dict[int, SampledAnswer](), torch.device(wrapped.device)
    with weights_for_answers(wrapped, plan) as is_collective:
        model = AnswerModel(
            wrapped.module.lm,
            device,
            tp_group=tp_group,
            is_collective=is_collective,
            packs_documents=wrapped.module.packs_documents,
            on_forward=request.on_forward,
            routers=next((each.routers for each in wrapped.module.extras if isinstance(each, BalanceLoss)), None),
        )
        check_cache(model, wrapped.module.lm)
        rows = request.batch_rows or _rows_in_memory(model, plan, request)
        drawing = Drawing(request.limits, request.seed, device)
        for parts in _batches(request, plan, rows):
            if request.is_over():
                return None
            for group in sampled_together(parts, model):
                answers |= BatchOfAnswers(model, group, drawing, request.limits).run(request.on_answer)
            model.join_others()
    return answers


def sampled_together(parts: Sequence[PromptPart], model: AnswerModel) -> Iterator[Sequence[PromptPart]]:
    """The parts of a batch that are sampled together: all, or those with prompts of one length."""
    if model.takes_mixed_lengths:
        yield from [parts] if parts else []
        return
    for length in sorted({part.length for part in parts}):
        yield [part for part in parts if part.length == length]


def _rows_in_memory(model: AnswerModel, plan: Plan, request: SamplingRequest) -> int:
    """Rows for which the rank with the least free memory has room; collective."""
    (prompt,), logits = model.read_prompts([request.prompts[0].ids[:1]])
    tokens = max(len(each.ids) for each in request.prompts) + request.limits.max_new_tokens
    free = least_free_bytes(plan)
    return rows_of_batch(free, tokens=tokens, token_bytes=token_bytes(prompt), vocabulary=logits.shape[1])


def _batches(request: SamplingRequest, plan: Plan, rows: int) -> Iterator[list[PromptPart]]:
    """This rank's batches of at most `rows` rows, as many as every other rank has; some may be empty.

    Prompts are sorted by length and dealt to the ranks in turn: a rank's work is that of its prompts' tokens and of its
    answers, of which nothing is known. Groups stay together unless one is larger than a batch.
    """
    prompts, group_size, ranks = request.prompts, request.group_size, plan.zero_ranks
    rank = plan.mesh.place("dp") * plan.mesh.sp + plan.mesh.place("sp")
    order = sorted(range(len(prompts)), key=lambda place: (len(prompts[place].ids), place))
    size = min(group_size, rows)
    samples = [range(first, min(first + size, group_size)) for first in range(0, group_size, size)]
    parts = [
        PromptPart(prompts[place], some, place * group_size + some.start)
        for place in order[rank::ranks]
        for some in samples
    ]
    most = math.ceil(len(prompts) / ranks) * len(samples)
    number = math.ceil(most / max(1, rows // size))
    for batch in range(number):
        yield parts[batch * len(parts) // number : (batch + 1) * len(parts) // number]
