"""Draws tokens with noise that is a function of numbers: of the seed, the prompt, the answer, the position and the id.

So an answer does not depend on the rank that samples it, nor on the rows beside it. The largest of log p + g over ids,
with independent g of a standard Gumbel distribution, is a sample of p (Gumbel, 1954); so is the largest of log(u) / p,
with u between 0 and 1, of which g = -log(-log u) is made.
"""

from collections.abc import Iterable

import torch

from ds_finetune.plan.forward import rows_drawn_at_once

_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
"""The numbers of splitmix64 (Steele, Lea and Flood, 2014), as signed integers: products wrap around in both."""
_BITS = 52
"""Random bits of a number between 0 and 1; with half of the last one added it is exact in fp64, and neither 0 nor 1."""


def mix(values: torch.Tensor) -> torch.Tensor:
    """The hash of splitmix64 of each int64, in place."""
    for shift, factor in _ROUNDS:
        values.bitwise_xor_(_shift_right(values, shift)).mul_(factor)
    return values.bitwise_xor_(_shift_right(values, _LAST_SHIFT))


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """As of unsigned integers: zeros come in from the left."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _wrap(number: int) -> int:
    """The int64 with the same last 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def answer_keys(seed: int, answers: Iterable[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """The key of each answer, which is the number of a rollout, of a prompt and of the answer; int64 [answers]."""
    numbers = torch.tensor(list(answers), dtype=torch.int64).view(-1, 3)
    keys = torch.full((len(numbers),), _wrap(seed), dtype=torch.int64)
    for column in numbers.unbind(1):
        keys = mix(mix(keys + _STEP) + column * _STEP)
    return keys.to(device)


def id_keys(vocabulary: int, device: torch.device) -> torch.Tensor:
    """The key of each id, int64 [vocabulary]."""
    return mix(torch.arange(1, vocabulary + 1, device=device) * _STEP)


def log_uniform_noise(keys: torch.Tensor, of_ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of independent numbers between 0 and 1, fp64 [answers, vocabulary], of keys of answers at a position
    and keys of ids.
    """
    bits = mix(keys[:, None] + of_ids)
    return _shift_right(bits, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS).log_()


def draw_tokens(
    logits: torch.Tensor, keys: torch.Tensor, of_ids: torch.Tensor, *, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id for each row of `logits` fp32 [answers, vocabulary], int64 [answers], drawn from their softmax, and its
    log-probability, fp32 [answers]. `position` is the number of tokens that the answers have.
    """
    keys = mix(keys + _wrap((position + 1) * _STEP))
    rows = rows_drawn_at_once(logits.device.type, vocabulary=logits.shape[1])
    parts = [_draw(*part, of_ids) for part in zip(logits.split(rows), keys.split(rows), strict=True)]
    ids, log_probs = (torch.cat(each) for each in zip(*parts, strict=True))
    return ids, log_probs


def _draw(logits: torch.Tensor, keys: torch.Tensor, of_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = logits.log_softmax(dim=-1)
    ids = log_uniform_noise(keys, of_ids).div_(log_probs.exp()).argmax(dim=-1)
    return ids, log_probs.gather(1, ids[:, None])[:, 0]
