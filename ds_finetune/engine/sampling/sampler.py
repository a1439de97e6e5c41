"""Samples answers to prompts, which are distributed over the ranks, in batches as large as memory allows.

All rows of a batch get one token at a time. Rows whose answers have ended are dropped from the batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.engine.generation import least_free_bytes, weights_for_answers
from ds_finetune.engine.sampling.answer_model import AnswerModel, check_cache
from ds_finetune.engine.sampling.answers import (
    Finish,
    OnAnswer,
    PromptToSample,
    SampledAnswer,
    SamplingLimits,
    SamplingRequest,
)
from ds_finetune.engine.sampling.noise import answer_keys, id_keys, sample_tokens
from ds_finetune.engine.sampling.row_cache import ReadPrompt, RowCache, token_bytes
from ds_finetune.errors import RunError
from ds_finetune.features.routers import BalanceLoss
from ds_finetune.model.attention.latents import attending_to_latents
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.plan.forward import PROMPT_TOKENS, rows_of_batch
from ds_finetune.plan.plan import Plan

_MIN_RUNNING_FRACTION = 7 / 8
"""Ended answers stay in the batch while more than this fraction runs, because dropping rows copies the KV cache."""
_BROKEN = -1
"""Stands for a token id where logits are not finite, so that no token can be sampled. The answer ends there."""


def check_answers(answers: Iterable[SampledAnswer]) -> None:
    """Raise RunError if the logits of an answer were not finite. All ranks that have the same `answers` raise it."""
    for answer in answers:
        if answer.ids[-1] == _BROKEN:
            raise RunError(
                f"token {len(answer.ids)} of an answer cannot be sampled: logits are not finite",
                hint="lower optim.lr, or train in bf16 or fp32 instead of fp16",
            )


@dataclass(frozen=True)
class PromptPart:
    """Some of the answers to one prompt: those with the numbers `samples`. `index` is the index of the first one among
    the answers to all prompts.
    """

    prompt: PromptToSample
    samples: range
    index: int

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt.ids)


@dataclass
class _RunningAnswer:
    index: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, token: int, log_prob: float, limits: SamplingLimits) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        if token == _BROKEN:
            # Other ranks wait for this rank's forwards, so the error of non-finite logits is raised later.
            self.finish = "length"
        elif token in limits.stop_ids or (limits.stops is not None and limits.stops(self.ids)):
            self.finish = "stop"
        elif len(self.ids) == limits.max_new_tokens:
            self.finish = "length"

    def sampled(self) -> SampledAnswer:
        assert self.finish is not None
        experts = np.stack(self.experts) if self.experts else None
        return SampledAnswer(np.array(self.ids), np.array(self.log_probs, dtype=np.float32), self.finish, experts)


class TokenChoice:
    """Chooses tokens from logits: sampled tokens with a seed, or the most likely tokens without one."""

    def __init__(self, limits: SamplingLimits, seed: int | None, device: torch.device) -> None:
        self.limits, self._seed, self._device = limits, seed, device
        self._forbidden: torch.Tensor | None = None
        self._of_ids = torch.zeros(0, dtype=torch.int64)

    def keys(self, parts: Sequence[PromptPart]) -> torch.Tensor:
        """Sampling keys of all answers in `parts`, int64 [rows]."""
        numbers = [(part.prompt.key, part.prompt.number, sample) for part in parts for sample in part.samples]
        return answer_keys(self._seed or 0, numbers, self._device)

    def tokens(self, logits: torch.Tensor, keys: torch.Tensor, *, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose an id for each row of `logits`, fp32 [rows, vocabulary]. Returns ids and log-probabilities."""
        if self._forbidden is None:
            size, allowed = logits.shape[1], self.limits.allowed
            allowed = torch.ones(size, dtype=torch.bool) if allowed is None else allowed
            assert allowed.any(), self.limits
            self._forbidden, self._of_ids = ~allowed.to(self._device), id_keys(size, self._device)
        logits = logits.masked_fill_(self._forbidden, float("-inf"))
        if self._seed is not None:
            return sample_tokens(logits, keys, self._of_ids, position=position)
        log_probs, ids = logits.log_softmax(dim=-1).max(dim=-1)
        return ids, log_probs


class BatchOfAnswers:
    """Samples one batch of answers. `parts` are the answers of each prompt, sorted by prompt length."""

    def __init__(self, model: AnswerModel, parts: Sequence[PromptPart], choice: TokenChoice) -> None:
        self._model, self._choice = model, choice
        self._running = [_RunningAnswer(part.index + number) for part in parts for number in range(len(part.samples))]
        self._ended: dict[int, SampledAnswer] = {}
        self._keys = choice.keys(parts)
        lengths = [part.length for part in parts for _ in part.samples]
        self._lengths = torch.tensor(lengths, device=model.device)
        columns = max(lengths)
        # The last token of an answer is never read by the model, so the cache needs no column for it.
        longest = columns + choice.limits.max_new_tokens - 1
        self._is_key = None
        if min(lengths) < columns:
            first = (columns - self._lengths)[:, None, None, None]
            self._is_key = torch.arange(longest, device=model.device) >= first
        self._logits: list[torch.Tensor] = []
        self._experts: list[NDArray[np.int16]] = []
        """The experts of the latest token that the model has read, for each row; empty for a model without experts."""
        self._cache = RowCache(self._read_prompts(parts), rows=len(lengths), columns=columns, longest=longest)

    def _read_prompts(self, parts: Sequence[PromptPart]) -> Iterator[tuple[ReadPrompt, slice]]:
        """Prefill in several forwards, with the KV cache of one forward at a time. Yields each prompt with its rows."""
        begin, size = 0, max(1, PROMPT_TOKENS // parts[-1].length)
        for first in range(0, len(parts), size):
            some = parts[first : first + size]
            prompts, logits = self._model.read_prompts([part.prompt.ids for part in some])
            for index, (part, prompt, row) in enumerate(zip(some, prompts, logits, strict=True)):
                self._logits.append(row.expand(len(part.samples), -1))
                if self._model.routers is not None:
                    self._experts += [self._model.routers.choice_hashes[index]] * len(part.samples)
                yield prompt, slice(begin, begin + len(part.samples))
                begin += len(part.samples)

    def run(self, on_answer: OnAnswer) -> dict[int, SampledAnswer]:
        """Sample until all answers have ended. Returns them by index. `on_answer` is called when an answer ends."""
        logits, self._logits = torch.cat(self._logits), []
        # If forwards are collective, ZeRO-3 may gather the weights again, so nothing made from them is kept.
        with attending_to_latents(self._model.lm, keeps_weights=not self._model.is_collective):
            for position in range(self._choice.limits.max_new_tokens):
                ids = self._sample(logits, position, on_answer)
                if all(answer.finish for answer in self._running):
                    break
                running = [row for row, answer in enumerate(self._running) if answer.finish is None]
                if len(running) <= _MIN_RUNNING_FRACTION * len(self._running):
                    self._running = [self._running[row] for row in running]
                    rows = torch.tensor(running, device=ids.device)
                    self._cache.keep_rows(rows)
                    self._keys, self._lengths, ids = self._keys[rows], self._lengths[rows], ids[rows]
                    self._is_key = None if self._is_key is None else self._is_key[rows]
                is_key = None if self._is_key is None else self._is_key[..., : self._cache.columns + 1]
                logits = self._model.read_tokens(ids, self._lengths + position, self._cache, is_key)
                self._experts = [] if self._model.routers is None else list(self._model.routers.choice_hashes)
        return self._ended

    def _sample(self, logits: torch.Tensor, position: int, on_answer: OnAnswer) -> torch.Tensor:
        sampled, log_probs = self._choice.tokens(logits, self._keys, position=position)
        ids = self._model.agreed(sampled.where(log_probs.isfinite(), _BROKEN))
        for row, (answer, token, log_prob) in enumerate(
            zip(self._running, ids.tolist(), log_probs.tolist(), strict=True)
        ):
            if answer.finish is not None:
                continue
            answer.experts += self._experts[row : row + 1]
            answer.add(token, log_prob, self._choice.limits)
            if answer.finish:
                self._ended[answer.index] = answer.sampled()
                if token != _BROKEN:
                    on_answer(answer.index, self._ended[answer.index])
        return ids.clamp(min=0)


def sample_parts(
    model: AnswerModel, parts: Sequence[PromptPart], choice: TokenChoice, on_answer: OnAnswer = lambda *_: None
) -> dict[int, SampledAnswer]:
    """Sample answers to the prompts in `parts`; returns them by index. Some models need a batch per prompt length."""
    if model.takes_mixed_lengths:
        return BatchOfAnswers(model, parts, choice).run(on_answer) if parts else {}
    answers: dict[int, SampledAnswer] = {}
    for length in sorted({part.length for part in parts}):
        group = [part for part in parts if part.length == length]
        answers |= BatchOfAnswers(model, group, choice).run(on_answer)
    return answers


def sample_prompts(
    wrapped: Any,  # noqa: ANN401 - a DeepSpeedEngine
    plan: Plan,
    tp_group: TensorParallelGroup | None,
    request: SamplingRequest,
) -> dict[int, SampledAnswer] | None:
    """Sample answers to this rank's prompts, by index among all answers; None if `is_over` becomes true."""
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
        check_cache(model)
        rows = request.batch_rows
        if rows is None:
            (prompt,), logits = model.read_prompts([request.prompts[0].ids[:1]])
            tokens = max(len(other.ids) for other in request.prompts) + request.limits.max_new_tokens
            free, vocabulary = least_free_bytes(plan), logits.shape[1]
            rows = rows_of_batch(free, tokens=tokens, token_bytes=token_bytes(prompt), vocabulary=vocabulary)
        choice = TokenChoice(request.limits, request.seed, device)
        for parts in _batches(request, plan, rows):
            if request.is_over():
                return None
            answers |= sample_parts(model, parts, choice, request.on_answer)
            model.join_others()
    return answers


def _batches(request: SamplingRequest, plan: Plan, rows: int) -> Iterator[list[PromptPart]]:
    """This rank's batches of at most `rows` answers. Every rank has equally many batches, of which some may be empty.
    Prompts are sorted by length and dealt to the ranks in turn, which balances the work of prefill. The answers to a
    prompt stay in one batch unless they are more than `rows`.
    """
    prompts, group_size, ranks = request.prompts, request.group_size, plan.zero_ranks
    rank = plan.mesh.coordinate("dp") * plan.mesh.sp + plan.mesh.coordinate("sp")
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index].ids), index))
    size = min(group_size, rows)
    samples = [range(first, min(first + size, group_size)) for first in range(0, group_size, size)]
    parts = [
        PromptPart(prompts[index], some, index * group_size + some.start)
        for index in order[rank::ranks]
        for some in samples
    ]
    most_parts = math.ceil(len(prompts) / ranks) * len(samples)
    number = math.ceil(most_parts / max(1, rows // size))
    for batch in range(number):
        yield parts[batch * len(parts) // number : (batch + 1) * len(parts) // number]
