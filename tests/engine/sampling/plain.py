"""Answers token by token, each from a forward of the whole text without a cache, with the noise of the sampler."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_finetune.engine.sampling.answers import PromptToSample, SampledAnswer, SamplingLimits
from ds_finetune.engine.sampling.noise import answer_keys, id_keys, sample_tokens
from ds_finetune.families.configs import VOCAB

SEED = 7
ALLOWED = torch.arange(VOCAB) < 93
CPU = torch.device("cpu")


def prompts_of(lengths: Sequence[int], *, vocabulary: int = 90) -> list[PromptToSample]:
    """Prompts of random ids below `vocabulary`; their numbers are not those of their places."""
    rng = np.random.default_rng(3)
    return [
        PromptToSample(10 + 3 * place, rng.integers(3, vocabulary, size=length).tolist(), key=5)
        for place, length in enumerate(lengths)
    ]


@torch.no_grad()
def plain_answer(
    model: PreTrainedModel, prompt: PromptToSample, sample: int, limits: SamplingLimits, *, greedy: bool = False
) -> SampledAnswer:
    """One answer of plain transformers."""
    key = answer_keys(SEED, [(prompt.key, prompt.number, sample)], CPU)
    ids: list[int] = []
    log_probs: list[float] = []
    for position in count():
        logits = model(torch.tensor([[*prompt.ids, *ids]]), use_cache=False).logits[:, -1].float()
        if limits.allowed is not None:
            logits[:, ~limits.allowed] = -torch.inf
        drawn = sample_tokens(logits, key, id_keys(logits.shape[1], CPU), position=position)[0]
        token = int(logits.argmax() if greedy else drawn)
        ids.append(token)
        log_probs.append(float(logits.log_softmax(-1)[0, token]))
        if token in limits.stop_ids or (limits.stops is not None and limits.stops(ids)):
            return SampledAnswer(np.array(ids), np.array(log_probs, dtype=np.float32), "stop")
        if len(ids) == limits.max_new_tokens:
            return SampledAnswer(np.array(ids), np.array(log_probs, dtype=np.float32), "length")
    raise AssertionError


def assert_same(answer: SampledAnswer, wanted: SampledAnswer, *, within: float = 1e-4) -> None:
    """The same tokens and end, and the same log-probabilities but for rounding: eps times logits of up to 30, which
    some 30 products and sums precede.
    """
    assert answer.ids.tolist() == wanted.ids.tolist()
    assert answer.finish == wanted.finish
    assert answer.log_probs.dtype == np.float32
    assert np.abs(answer.log_probs - wanted.log_probs).max() <= within
