"""Greedy answers to prompts, which are distributed over the ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_finetune.engine.answer_weights import weights_for_answers
from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class GenerationLimits:
    """An answer ends after `max_new_tokens` tokens, or at one of `stop_ids`; `pad_id` is the padding token."""

    max_new_tokens: int
    stop_ids: list[int]
    pad_id: int


def answer_prompts(
    wrapped: Any,  # noqa: ANN401 - a DeepSpeedEngine
    plan: Plan,
    prompts: list[list[int]],
    limits: GenerationLimits,
    *,
    is_over: Callable[[], bool],
) -> dict[int, list[int]] | None:
    """Answers to this rank's prompts by their numbers; None where `is_over` is true before one of them."""
    answers, device = {}, torch.device(wrapped.device)
    with weights_for_answers(wrapped, plan) as is_collective:
        for number, prompt in _prompts_of_rank(prompts, plan):
            if is_over():
                return None
            lm = wrapped.module.lm
            answers[number] = _answer_prompt(lm, prompt, limits, device=device, is_collective=is_collective)
    return answers


def _prompts_of_rank(prompts: list[list[int]], plan: Plan) -> list[tuple[int, list[int]]]:
    """This rank's prompts with their numbers.

    Under ZeRO-3 every rank must run the model equally often, so ranks may repeat the last prompt.
    """
    mesh = plan.mesh
    ranks, rank = plan.zero_ranks, mesh.place("dp") * mesh.sp + mesh.place("sp")
    rounds = math.ceil(len(prompts) / ranks)
    numbers = [min(turn * ranks + rank, len(prompts) - 1) for turn in range(rounds)]
    return [(number, prompts[number]) for number in numbers]


def _answer_prompt(
    lm: nn.Module, prompt: list[int], limits: GenerationLimits, *, device: torch.device, is_collective: bool
) -> list[int]:
    """Token ids of the greedy answer, without the prompt and the stop token.

    With `is_collective` a rank whose answer ends runs the model until those of all ranks do. There is no cache then
    where modules run only at some lengths of a text (`_is_stateful`), for whose weights other ranks would wait.
    """
    ids = torch.tensor([prompt], device=device)
    with torch.no_grad():
        out = lm.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=limits.max_new_tokens,
            eos_token_id=limits.stop_ids,
            pad_token_id=limits.pad_id,
            use_cache=not (is_collective and lm._is_stateful),
            synced_gpus=is_collective,
        )
    answer = out[0, len(prompt) :].tolist()
    ends = [index for index, token in enumerate(answer) if token in limits.stop_ids]
    return answer[: ends[0]] if ends else answer
