"""Generates greedy answers to prompts, which are distributed over the ranks.

Under ZeRO-3, weights are gathered once for all answers if memory allows.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import write_now
from ds_finetune.engine.groups.collectives import all_gather_scalar
from ds_finetune.engine.patches.deepspeed_gathering import full_weights
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.engine.state.parameter_tags import local_shape
from ds_finetune.plan.forward import WEIGHTS_SHARE
from ds_finetune.plan.plan import Plan
from ds_finetune.system.free_memory import available_bytes


def answer_prompts(
    wrapped: Any,  # noqa: ANN401 - a DeepSpeedEngine
    plan: Plan,
    prompts: list[list[int]],
    limits: SamplingLimits,
    *,
    is_over: Callable[[], bool],
) -> dict[int, list[int]] | None:
    """Token ids of the answers to this rank's prompts, without prompt and stop token; None if `is_over` is true."""
    answers, device = {}, torch.device(wrapped.device)
    with weights_for_answers(wrapped, plan) as is_collective:
        mesh, lm = plan.mesh, wrapped.module.lm
        ranks, rank = plan.zero_ranks, mesh.coordinate("dp") * mesh.sp + mesh.coordinate("sp")
        for turn in range(math.ceil(len(prompts) / ranks)):
            if is_over():
                return None
            # Under ZeRO-3 every rank must generate equally often, so some ranks repeat the last prompt.
            number = min(turn * ranks + rank, len(prompts) - 1)
            prompt = prompts[number]
            ids = torch.tensor([prompt], device=device)
            with torch.no_grad():
                out = lm.generate(  # type: ignore[operator]
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=limits.max_new_tokens,
                    eos_token_id=list(limits.stop_ids),
                    # An answer that has ended is padded while other ranks still generate.
                    pad_token_id=0,
                    # Ranks gather weights together, so all must run the same modules. Some modules run only at certain
                    # lengths. With a cache, lengths would differ between ranks.
                    use_cache=not (is_collective and lm._is_stateful),
                    # A rank whose answer has ended still runs the model until the answers of all ranks have ended.
                    synced_gpus=is_collective,
                )
            answer = out[0, len(prompt) :].tolist()
            ends = [index for index, token in enumerate(answer) if token in limits.stop_ids]
            answers[number] = answer[: ends[0]] if ends else answer
    return answers


@contextmanager
def weights_for_answers(wrapped: Any, plan: Plan) -> Iterator[bool]:  # noqa: ANN401 - a DeepSpeedEngine
    """Context in which weights under ZeRO-3 are gathered once for all answers, if every rank has the memory. Otherwise
    each token gathers them layer by layer. Rank zero prints which of the two happens. Yields whether forwards are
    collective; then every rank must run equally many.
    """
    is_partitioned, has_expert_ranks = plan.zero_stage == 3 and plan.zero_ranks > 1, plan.mesh.ep > 1
    if not is_partitioned:
        yield has_expert_ranks
        return
    obstacle = _obstacle_to_full_weights(wrapped.module.lm, plan)
    if obstacle:
        _report(
            plan.world.rank, f"answers under ZeRO-3: each token gathers the weights layer by layer, since {obstacle}"
        )
        yield True
        return
    _report(plan.world.rank, "answers under ZeRO-3: with full weights, gathered once")
    with full_weights(wrapped.optimizer, wrapped.module.lm):
        yield has_expert_ranks


def least_free_bytes(plan: Plan) -> float:
    """Free memory in bytes of the rank with the least free memory; collective."""
    if plan.device == "cuda":
        # Memory that torch has reserved but not allocated counts as free; after a step it is most of the memory.
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        free = available_bytes() // plan.world.local_world_size
    return min(all_gather_scalar(float(free)))


@lru_cache(maxsize=1)
def _report(rank: int, line: str) -> None:
    if rank == 0:
        write_now(sys.stderr, f"{line}\n")


def _obstacle_to_full_weights(lm: nn.Module, plan: Plan) -> str:
    if plan.offload_param != "none":
        return f"offload_param keeps them on {plan.offload_param}"
    need = sum(math.prod(local_shape(param)) * param.element_size() for param in lm.parameters())
    free = least_free_bytes(plan)
    if need <= WEIGHTS_SHARE * free:
        return ""
    return f"all of them take {need / GIB:.1f} GiB, more than half of the {free / GIB:.1f} GiB that a rank has free"
