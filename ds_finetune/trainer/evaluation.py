"""Evaluates held-out rows: their loss, and greedy answers to their prompts."""

import math
from collections.abc import Callable

from ds_finetune.data.batches import eval_batches, num_eval_rows
from ds_finetune.engine.engine import Engine, HeldOutScores
from ds_finetune.engine.generation import GenerationLimits
from ds_finetune.observers.evaluation import matches
from ds_finetune.observers.stop_signals import StopSignals
from ds_finetune.phase_line import PhaseLine
from ds_finetune.trainer.batches import eval_plan
from ds_finetune.trainer.prepare import PreparedRun


def evaluation_functions(
    run: PreparedRun, engine: Engine, signals: StopSignals
) -> tuple[Callable[[], HeldOutScores | None], Callable[[], float | None] | None]:
    """A function that evaluates the loss, and one that scores answers by exact match, or None without `eval.generate`.

    Each returns None where a signal ended it.
    """
    held_out, inputs = run.inputs.held_out, run.inputs
    assert held_out is not None
    generate, limit = run.config.eval.generate, run.config.eval.limit
    limits = GenerationLimits(generate.max_new_tokens, inputs.stop_ids, inputs.pad_token_id)
    rows = eval_plan(run)

    def phase(what: str, number: int, per_round: int) -> PhaseLine:
        return PhaseLine(what, math.ceil(number / per_round), is_rank_zero=engine.is_rank_zero)

    def evaluate() -> HeldOutScores | None:
        number = num_eval_rows(held_out, limit)
        with phase("evaluation", number, rows.micro_batch_size * rows.dp) as line:
            is_over = line.before_each(signals.is_stop_requested)
            return engine.evaluate(eval_batches(held_out, rows, limit=limit), is_over=is_over)

    def exact_match() -> float | None:
        prompts = held_out.prompts_and_answers(generate.prompts)
        with phase("answers", len(prompts), rows.dp) as line:
            is_over = line.before_each(signals.is_stop_requested)
            ids = engine.generate([prompt for prompt, _ in prompts], limits, is_over=is_over)
        if ids is None:
            return None
        answers, expected = (
            [inputs.tokenizer.decode(part, skip_special_tokens=True) for part in parts]
            for parts in (ids, [answer for _, answer in prompts])
        )
        return matches(answers, expected)

    return evaluate, exact_match if generate.prompts else None
