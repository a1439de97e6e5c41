"""Samples tokens with random numbers that are a function of seed, prompt, answer, position and token id.

So an answer depends neither on the rank that samples it nor on other rows of its batch. The argmax of log p + g over
ids, with independent g from a standard Gumbel distribution, is a sample from p (Gumbel, 1954). The argmax of log(u) /
p, with u uniform between 0 and 1, is a sample too, because g = -log(-log u).
"""

from collections.abc import Iterable

import torch

from ds_finetune.plan.forward import rows_sampled_at_once

_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
"""This shift, `_STEP` and `_ROUNDS` are the constants of splitmix64 (Steele, Lea and Flood, 2014). They are signed
integers, whose products wrap like unsigned ones.
"""
_BITS = 52
"""Number of random bits of a uniform number below 1. Half of the last bit is added, exactly in fp64, to exclude 0."""


def mix(values: torch.Tensor) -> torch.Tensor:
    """Hash each element of an int64 tensor, in place, by splitmix64's mixing function."""
    for shift, factor in _ROUNDS:
        values.bitwise_xor_(_shift_right(values, shift)).mul_(factor)
    return values.bitwise_xor_(_shift_right(values, _LAST_SHIFT))


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right, filling with zeros as for unsigned numbers."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def answer_keys(seed: int, answers: Iterable[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """Keys from which random numbers are computed, int64 [answers], from numbers of rollout, prompt and answer."""
    numbers = torch.tensor(list(answers), dtype=torch.int64).view(-1, 3)
    keys = torch.full((len(numbers),), _wrap(seed), dtype=torch.int64)
    for column in numbers.unbind(1):
        keys = mix(mix(keys + _STEP) + column * _STEP)
    return keys.to(device)


def id_keys(vocabulary: int, device: torch.device) -> torch.Tensor:
    """Keys of all token ids, int64 [vocabulary]. Random numbers are computed from keys of an answer and an id."""
    return mix(torch.arange(1, vocabulary + 1, device=device) * _STEP)


def log_uniform_noise(keys: torch.Tensor, of_ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of independent uniform numbers, fp64 [answers, vocabulary], from the keys of answers and ids."""
    bits = mix(keys[:, None] + of_ids)
    return _shift_right(bits, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS).log_()


def sample_tokens(
    logits: torch.Tensor, keys: torch.Tensor, of_ids: torch.Tensor, *, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample an id for each row of `logits`, fp32 [answers, vocabulary], from its softmax. Returns ids, int64
    [answers], and their log-probabilities, fp32 [answers]. Random numbers are computed from the answers' `keys`, the
    vocabulary's keys `of_ids`, and `position`, the number of tokens that the answers already have.
    """
    keys = mix(keys + _wrap((position + 1) * _STEP))
    rows = rows_sampled_at_once(logits.device.type, vocabulary=logits.shape[1])
    parts = [_sample(*part, of_ids) for part in zip(logits.split(rows), keys.split(rows), strict=True)]
    ids, log_probs = (torch.cat(each) for each in zip(*parts, strict=True))
    return ids, log_probs


def _sample(logits: torch.Tensor, keys: torch.Tensor, of_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = logits.log_softmax(dim=-1)
    ids = log_uniform_noise(keys, of_ids).div_(log_probs.exp()).argmax(dim=-1)
    return ids, log_probs.gather(1, ids[:, None])[:, 0]
