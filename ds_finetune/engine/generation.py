"""Greedy answers to prompts, which are distributed over the ranks."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class GenerationLimits:
    """An answer ends after `max_new_tokens` tokens, or at one of `stop_ids`; `pad_id` is the padding token."""

    max_new_tokens: int
    stop_ids: list[int]
    pad_id: int


def prompts_of_rank(prompts: list[list[int]], plan: Plan) -> list[tuple[int, list[int]]]:
    """This rank's prompts with their numbers.

    Under ZeRO-3 every rank must run the model equally often, so ranks may repeat the last prompt.
    """
    mesh = plan.mesh
    ranks, rank = plan.zero_ranks, mesh.place("dp") * mesh.sp + mesh.place("sp")
    rounds = math.ceil(len(prompts) / ranks)
    numbers = [min(turn * ranks + rank, len(prompts) - 1) for turn in range(rounds)]
    return [(number, prompts[number]) for number in numbers]


def answer_prompt(
    lm: nn.Module, prompt: list[int], limits: GenerationLimits, *, plan: Plan, device: torch.device
) -> list[int]:
    """Token ids of the greedy answer, without the prompt and the stop token."""
    ids = torch.tensor([prompt], device=device)
    with torch.no_grad():
        out = lm.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=limits.max_new_tokens,
            eos_token_id=limits.stop_ids,
            pad_token_id=limits.pad_id,
            use_cache=True,
            synced_gpus=_is_collective(plan),
        )
    answer = out[0, len(prompt) :].tolist()
    ends = [index for index, token in enumerate(answer) if token in limits.stop_ids]
    return answer[: ends[0]] if ends else answer


def _is_collective(plan: Plan) -> bool:
    """Whether a forward waits for other ranks, which must then run as many: parameters are gathered, or experts are on
    other ranks.
    """
    return (plan.zero_stage == 3 and plan.zero_ranks > 1) or plan.mesh.ep > 1
