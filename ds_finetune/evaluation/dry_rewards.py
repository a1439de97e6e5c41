"""Dry run of rewards before training: scores the data's reference answers, and answers sampled from the model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean

from transformers import PreTrainedTokenizerBase

from ds_finetune.config.rewards import RewardConfig
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.prompt_format import end_ids, template_settings, trained_ends
from ds_finetune.data.prompts import ANSWER
from ds_finetune.engine.sampling.answer_model import AnswerModel, check_cache
from ds_finetune.engine.sampling.answers import PromptToSample
from ds_finetune.engine.sampling.sampler import PromptPart, TokenChoice, sample_parts
from ds_finetune.errors import ConfigError
from ds_finetune.export.load import check_generates
from ds_finetune.export.safetensors_format import load_model
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.objectives.rewards.answers import AnswerToScore, column_of
from ds_finetune.objectives.rewards.pool import Part, Rewards, open_rewards
from ds_finetune.plan.settings import RunSettings
from ds_finetune.trainer.inputs import check_records
from ds_finetune.trainer.preview import training_rows
from ds_finetune.trainer.rollouts.sampling import AnswerTexts


@dataclass(frozen=True)
class ScoredAnswers:
    """Reference or sampled answers. `parts` has, by answer and reward, the result, or None if there is no score."""

    title: str
    answers: Sequence[AnswerToScore]
    parts: Sequence[Sequence[Part | None]]

    def column(self, reward: int) -> list[Part]:
        """Results of reward number `reward` for the answers that it scored."""
        return [part for parts in self.parts if (part := parts[reward]) is not None]

    def scores(self, reward: int) -> list[float]:
        """Scores by reward number `reward`, without the answers to which it is not applicable."""
        return [part["score"] for part in self.column(reward) if part.get("score") is not None]

    def errors(self, reward: int) -> list[str]:
        """Errors of reward number `reward`, each with the name of its answer."""
        pairs = zip(self.answers, self.parts, strict=True)
        return [
            f"{answer.where}: it {part['error']}"
            for answer, parts in pairs
            if (part := parts[reward]) is not None and "error" in part
        ]

    def numbers(self, reward: int) -> tuple[str, ...]:
        """Table cells of one reward: mean score, answers parsed, not applicable, errors, seconds per answer."""
        parts, scores = self.column(reward), self.scores(reward)
        read = [part["has_result"] for part in parts if part.get("has_result") is not None]
        errors = len(self.errors(reward))
        seconds = f"{mean(part['seconds'] for part in parts):.3f}" if parts else "-"
        mean_score = f"{mean(scores):.3f}" if scores else "-"
        parsed = f"{sum(read)}/{len(read)}" if read else "-"
        return mean_score, parsed, str(len(parts) - len(scores) - errors), str(errors), seconds


@dataclass(frozen=True)
class _RewardTrial:
    run: RunSettings
    rows: PreparedRows
    tokenizer: PreTrainedTokenizerBase

    def references(self, rewards: Rewards, most: int) -> ScoredAnswers:
        numbers = range(min(most, len(self.rows)))
        texts = [[_reference_text(section, self.rows.record(n)) for section in self.run.rewards] for n in numbers]
        given = [
            [self._answer(number, text or "", self.tokenizer(text or "")["input_ids"]) for text in of_record]
            for number, of_record in zip(numbers, texts, strict=True)
        ]
        results = rewards.start([answer for of_record in given for answer in of_record]).parts()
        parts = [
            [None if text is None else results[row * len(of_record) + at][at] for at, text in enumerate(of_record)]
            for row, of_record in enumerate(texts)
        ]
        return ScoredAnswers(f"reference answers of {len(given)} records", [answers[0] for answers in given], parts)

    def samples(self, rewards: Rewards, most: int) -> ScoredAnswers:
        folder = resolve_folder(self.run.model.path)
        check_generates(folder)
        lm = load_model(folder, "")
        model, seed = AnswerModel(lm, lm.device), self.run.train.seed
        check_cache(model)
        trained = trained_ends(self.tokenizer, template_settings(self.run.data, self.tokenizer))
        stops, vocabulary = end_ids(folder, lm.config, self.tokenizer, trained), lm.config.get_text_config().vocab_size
        texts = AnswerTexts(self.tokenizer, tuple(stops), vocabulary, self.run.rollout)
        numbers = range(min(most, len(self.rows)))
        prompts = [PromptToSample(number, self.rows.prompt_ids(number), key=0) for number in numbers]
        parts = [PromptPart(prompt, range(1), prompt.number) for prompt in prompts]
        parts.sort(key=lambda part: part.length)
        sampled = sample_parts(model, parts, TokenChoice(texts.limits, seed, lm.device))
        answers = [texts.to_score(self.rows, number, sampled[number], 0) for number in numbers]
        return ScoredAnswers(f"{len(answers)} answers of the model", answers, rewards.start(answers).parts())

    def _answer(self, number: int, text: str, ids: Sequence[int]) -> AnswerToScore:
        prompt = str(self.tokenizer.decode(self.rows.prompt_ids(number)))
        return AnswerToScore(self.rows.record(number), prompt, text, list(ids), "stop", self.rows.where(number))


def try_rewards(run: RunSettings, *, records: int, samples: int) -> list[ScoredAnswers]:
    """Try a run's rewards on the reference answers of the first `records` data rows, and on one sampled answer to each
    of the first `samples` prompts.

    ConfigError where the run has no rewards, or one cannot be loaded; DataError for a row that a reward cannot use.
    """
    if not run.rewards:
        raise ConfigError(
            f"objective {run.objective.name} has no rewards to try", hint="set objective: grpo and `rewards`"
        )
    rows, tokenizer, _ = training_rows(run)
    check_records(run.rewards, rows)
    trial = _RewardTrial(run, rows, tokenizer)
    with open_rewards(run.rewards) as rewards:
        scored = [trial.references(rewards, records)]
        if samples and run.model.weights == "load":
            scored.append(trial.samples(rewards, samples))
    return scored


def _reference_text(section: RewardConfig, record: Mapping[str, object]) -> str | None:
    """Reference answer of a data row, written in the form that the reward parses; None if the row has none."""
    column = section.read_column if section.reward != "code" else ANSWER
    value = column_of(record, column or ANSWER)
    value = value[0] if section.reward == "exact_match" and isinstance(value, list) else value
    if value is None:
        return None
    if section.reward == "choice" and isinstance(value, int):
        return chr(ord("A") + value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if section.reward == "math" and not any(mark in text for mark in (r"\boxed", "$")):
        return rf"\boxed{{{text}}}"
    return f"```python\n{text}\n```" if section.reward == "code" and "```" not in text else text


def faults(sections: Sequence[RewardConfig], scored: Sequence[ScoredAnswers]) -> Iterator[str]:
    """Yield faults: errors, built-in rewards that score no reference answer above 0, functions that score all alike."""
    for at, section in enumerate(sections):
        name, errors = section.shown_name, list(chain.from_iterable(each.errors(at) for each in scored))
        scores = list(chain.from_iterable(each.scores(at) for each in scored))
        references = scored[0].scores(at)
        if errors:
            yield f"reward `{name}` failed on {errors[0]}"
        elif section.is_builtin and section.read_column and scored[0].column(at) and max(references, default=0) <= 0:
            example = _reference_text(section, scored[0].answers[0].record)
            text = f"the first is {example!r:.80}"
            yield f"reward `{name}` gives none of the {len(references)} reference answers a score above 0; {text}"
        elif not section.is_builtin and (not scores or max(scores) == min(scores) <= 0):
            yield f"reward `{name}` gives every answer {f'the score {scores[0]:g}' if scores else 'None'}"
