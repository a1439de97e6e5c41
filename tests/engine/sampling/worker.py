"""Started by the tests as `torchrun worker.py MODELS OUT.json LAYOUT...`: the answers that every layout samples."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch
from ds_finetune.engine import generation
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.sampling.answers import PromptToSample, SampledAnswer, SamplingLimits, SamplingRequest
from ds_finetune.engine.sampling.sampler import TokenChoice
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import RunError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import batch_plan, whole_batch
from ds_finetune.system.world import World
from tests.engine.sampling.plain import ALLOWED, SEED, prompts_of
from tests.parity.four_bit import WIDE
from tests.planning import model_of

LENGTHS, GROUP = (9, 1, 17, 9, 2), 3
LIMITS = SamplingLimits(8, (1, 2, 4, 11), ALLOWED)
LAYOUTS = {
    "zero0": Cell("deepseek_v3", 0, 1, packing=False),
    "zero1": Cell("llama", 1, 1, packing=False),
    "zero2": Cell("deepseek_v3", 2, 1, packing=False, checkpointing=True),
    "zero3": Cell("deepseek_v3", 3, 1, packing=False),
    "zero3-layers": Cell("qwen3_moe", 3, 1, packing=False),
    "zero3-offload": Cell("llama", 3, 1, packing=False, offload="param"),
    "lora": Cell("deepseek_v3", 3, 1, packing=True, has_lora=True),
    "qlora": Cell(WIDE, 2, 1, packing=False, has_lora=True),
    "tp": Cell("llama", 1, 1, packing=False, tp=2),
    "tp-zero3": Cell("deepseek_v3", 3, 1, packing=False, tp=2),
    "sp": Cell("llama", 3, 1, packing=False, sp=2),
    "ep": Cell("deepseek_v3", 1, 1, packing=False, ep=2),
    "pp": Cell("llama", 1, 1, packing=False, pp=2),
}


WITH_STEP = ("lora", "qlora")
"""Layouts that take a step first, after which adapters are not zeros."""
OTHER_OBJECTIVE = ("qlora", "pp")
"""Layouts that the objective grpo refuses."""


def main() -> None:
    """Sample in every layout; rank zero writes what all ranks have."""
    world, device = World.from_environment(os.environ), choose_device()
    models, out, *names = sys.argv[1:]
    found: dict[str, Any] = {}
    with process_group(world, device):
        for name in names:
            cell = LAYOUTS[name]
            tree = run_tree(cell, Path(models) / cell.family, Path(out).parent, dp=world.world_size // cell.sharing)
            if name == "qlora":
                tree["lora"] |= {"quantize": "nf4", "rank": 4}
            if name not in OTHER_OBJECTIVE:
                prompts = world.world_size // cell.sharing
                tree["objective"] = {"name": "grpo", "group_size": 2}
                tree["rollout"] = {"prompts_per_step": prompts, "max_new_tokens": LIMITS.max_new_tokens}
                tree["rewards"] = ["exact_match"]
                tree["train"] |= {"global_batch_size": 2 * prompts, "micro_batch_size": 2}
            config = RunConfig.model_validate(tree)
            # Nothing fits into no memory, so that each layer is gathered for each token.
            generation.WEIGHTS_SHARE = 0.0 if name == "zero3-layers" else 0.5
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            with start_engine(plan, model_of(config)) as engine:
                found[name] = _sampled(engine, has_step=name in WITH_STEP)
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))


def _sampled(engine: Engine, *, has_step: bool) -> dict[str, Any]:
    """Answers in batches as memory allows, and of at most two rows; the same on all ranks. And how far the
    log-probabilities of their tokens are from those of training forwards.
    """
    prompts, every, is_grpo = prompts_of(LENGTHS), [], engine.objective.head == "answers"
    if is_grpo:
        engine.allow_only(LIMITS.allowed)
    if has_step:
        first = _sample(engine, prompts, GROUP)
        assert first is not None
        engine.step(_batch(engine, first) if is_grpo else whole_batch(engine), lr=1e-2)
    engine._ds.train()
    for rows in (None, 2):
        answers = _sample(engine, prompts, GROUP, batch_rows=rows)
        assert answers is not None
        every.append([[(a.ids.tolist(), a.log_probs.tolist(), a.finish) for a in group] for group in answers])
    assert engine._ds.training
    assert all(part == every for part in all_gather_object(every))
    calls: list[int] = []
    _sample(engine, prompts[:1], 1, on_forward=lambda: calls.append(1))
    assert calls
    told: dict[int, SampledAnswer] = {}
    again = _sample(engine, prompts, GROUP, on_answer=told.__setitem__)
    assert again is not None
    flat = list(chain.from_iterable(again))
    assert all(flat[place].ids.tolist() == answer.ids.tolist() for place, answer in told.items())
    assert set(range(len(flat))) == {place for part in all_gather_object(list(told)) for place in part}
    _check_error_on_every_rank(engine)
    assert _sample(engine, prompts, 1, is_over=lambda: True) is None
    assert answers is not None
    known = engine.token_log_probs([_batch(engine, answers)]) if is_grpo else _by_logits(engine, answers)
    flat = [answer for group in answers for answer in group]
    worst = max(float(np.abs(known[number] - answer.log_probs).max()) for number, answer in enumerate(flat))
    differing = _differing_experts(engine, answers) if is_grpo else []
    return {"auto": every[0], "small": every[1], "training": worst, "experts": differing}


def _differing_experts(engine: Engine, answers: list[list[SampledAnswer]]) -> list[float]:
    """Shares of tokens whose experts in training forwards are not those of sampling: with the same weights, and at
    stage 0 with other ones of the routers.
    """
    found = [engine.step(_batch(engine, answers), lr=0).counted.get("routers")]
    if found[0] is not None and engine.plan.zero_stage == 0:
        for name, param in engine.lm.named_parameters():
            param.data += torch.randn_like(param) * param.std() if ".gate." in name else 0
        found.append(engine.step(_batch(engine, answers), lr=0).counted["routers"])
    return [choices.mismatch for choices in found if choices is not None]


def _sample(
    engine: Engine, prompts: Sequence[PromptToSample], size: int, **others: Any
) -> list[list[SampledAnswer]] | None:
    return engine.sample(SamplingRequest(prompts, size, LIMITS, SEED, **others))


def _check_error_on_every_rank(engine: Engine) -> None:
    """Where the first rank that samples, with those that share its rows, has logits that are not finite."""
    tokens = TokenChoice.tokens
    if engine.plan.mesh.coordinate("dp") == engine.plan.mesh.coordinate("sp") == 0:
        TokenChoice.tokens = lambda *args, **keys: (tokens(*args, **keys)[0], torch.full((len(args[1]),), torch.nan))  # type: ignore[method-assign]
    with pytest.raises(RunError, match="logits are not finite"):
        _sample(engine, prompts_of(LENGTHS), GROUP, batch_rows=4)
    TokenChoice.tokens = tokens  # type: ignore[method-assign]


def _by_logits(engine: Engine, answers: list[list[SampledAnswer]]) -> dict[int, np.ndarray]:
    """Log-probabilities of all answers from the logits of whole texts."""
    pairs = [
        (prompt.ids, answer.ids) for prompt, group in zip(prompts_of(LENGTHS), answers, strict=True) for answer in group
    ]
    texts = engine.logits([[*prompt, *ids.tolist()] for prompt, ids in pairs])
    found = {}
    for number, (logits, (prompt, ids)) in enumerate(zip(texts, pairs, strict=True)):
        log_probs = logits[len(prompt) - 1 : -1].masked_fill(~ALLOWED, -torch.inf).log_softmax(-1)
        found[number] = log_probs.gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()
    return found


def _batch(engine: Engine, answers: list[list[SampledAnswer]]) -> Batch:
    """All answers with made-up advantages."""
    scored = [
        ScoredAnswer(prompt.ids, answer.ids, (-1.0) ** sample, GROUP * place + sample, experts=answer.experts)
        for place, (prompt, group) in enumerate(zip(prompts_of(LENGTHS), answers, strict=True))
        for sample, answer in enumerate(group)
    ]
    plan = replace(batch_plan(engine.plan, engine.objective), meets_each_forward=engine.plan.meets_each_forward)
    return answer_batch(scored, replace(plan, streamed_row_cost=lambda row: float(row.num_tokens)))


if __name__ == "__main__":
    main()
    exit_process()
