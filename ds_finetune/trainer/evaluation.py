"""Evaluates held-out rows: their loss, and greedy answers to their prompts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.data.batches import BatchPlan, MicroBatch, eval_baseline, eval_batches, num_eval_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.generation import GenerationLimits
from ds_finetune.engine.results import HeldOutScores
from ds_finetune.observers.evaluation import matches
from ds_finetune.observers.samples import MOST_SAMPLES
from ds_finetune.observers.stopping import StopSignals
from ds_finetune.runs.metrics import Sample
from ds_finetune.trainer.batches import batch_plan, eval_plan
from ds_finetune.trainer.prepare import PreparedRun, mismatched_answers

Scored = Callable[[], Mapping[str, HeldOutScores] | None]
Answered = Callable[[], Mapping[str, float] | None]
Collect = Callable[[Sequence[Sample]], None]
"""Takes the first answers of an evaluation."""
_ALL = "eval"
"""First part of the names of metrics over all held-out sets together."""


def evaluation_functions(
    run: PreparedRun, engine: Engine, signals: StopSignals, *, collect: Collect | None = None
) -> tuple[Scored, Answered | None]:
    """A function that evaluates the loss, and one that scores answers by exact match, or None without `eval.generate`.

    The latter passes the first answers of each set to `collect`.

    Their results are by the first part of metric names: `eval` for all rows together, and `eval/NAME` for each set that
    has a name. Each function returns None where a signal ended it.
    """
    evaluation = _HeldOutEvaluation(run, engine, signals, collect)
    return evaluation.scores, evaluation.exact_match if run.config.eval.generate.prompts else None


@dataclass(frozen=True)
class _HeldOutEvaluation:
    run: PreparedRun
    engine: Engine
    signals: StopSignals
    collect: Collect | None = None

    def scores(self) -> Mapping[str, HeldOutScores] | None:
        """Scores of each set, and of the rows of all sets together: each unit counts the same whatever its set."""
        plan, sets, limit = batch_plan(self.run), self.run.inputs.held_out, self.run.config.eval.limit
        per_round = plan.micro_batch_size * plan.dp
        rounds = sum(math.ceil(num_eval_rows(rows, limit) / per_round) for rows in sets.values())
        found: dict[str, HeldOutScores] = {}
        with self._phase("evaluation", rounds) as line:
            is_over = line.before_each(self.signals.is_stop_requested)
            for name, rows in sets.items():
                plan = eval_plan(self.run, name)
                scores = self.engine.evaluate(
                    eval_batches(rows, plan, limit=limit), baseline=self._baseline(rows, plan), is_over=is_over
                )
                if scores is None:
                    return None
                found[name] = scores
        return found if _ALL in found else {_ALL: self.engine.pool(found.values()), **found}

    def exact_match(self) -> Mapping[str, float] | None:
        """Share of right answers to the first prompts of each set, and to those of all sets together."""
        generate, dp = self.run.config.eval.generate, batch_plan(self.run).dp
        pairs = {name: rows.prompts_and_answers(generate.prompts) for name, rows in self.run.inputs.held_out.items()}
        answers: dict[str, tuple[list[str], list[str]]] = {}
        with self._phase("answers", sum(math.ceil(len(of_set) / dp) for of_set in pairs.values())) as line:
            is_over = line.before_each(self.signals.is_stop_requested)
            for name, of_set in pairs.items():
                ids = self.engine.generate([prompt for prompt, _ in of_set], self._limits, is_over=is_over)
                if ids is None:
                    return None
                answers[name] = (self._texts(ids), self._texts([answer for _, answer in of_set]))
        if self.collect is not None:
            self.collect([sample for name in pairs for sample in self._samples(name, pairs[name], *answers[name])])
        shares = {name: matches(*of_set) for name, of_set in answers.items()}
        given, expected = ([text for of_set in answers.values() for text in of_set[side]] for side in (0, 1))
        return {_ALL: matches(given, expected), **shares}

    def _baseline(self, rows: PreparedRows, plan: BatchPlan) -> Iterator[MicroBatch]:
        mismatched = mismatched_answers(self.run.plan, self.engine.objective, rows)
        return iter(()) if mismatched is None else eval_baseline(mismatched, plan, limit=self.run.config.eval.limit)

    @cached_property
    def _limits(self) -> GenerationLimits:
        inputs, generate = self.run.inputs, self.run.config.eval.generate
        return GenerationLimits(generate.max_new_tokens, inputs.stop_ids, inputs.pad_token_id)

    def _samples(
        self, name: str, pairs: Sequence[tuple[list[int], list[int]]], given: list[str], expected: list[str]
    ) -> Iterator[Sample]:
        """The first answers of a held-out set, with their prompts as the model sees them; a step is set later."""
        rows = list(zip(pairs, given, expected, strict=True))[:MOST_SAMPLES]
        for (prompt, _), answer, of_data in rows:
            yield Sample(0, name, self.run.inputs.tokenizer.decode(prompt), answer, of_data)

    def _texts(self, answers: list[list[int]]) -> list[str]:
        return [self.run.inputs.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]

    def _phase(self, what: str, rounds: int) -> PhaseLine:
        return PhaseLine(what, rounds, is_rank_zero=self.engine.is_rank_zero)
