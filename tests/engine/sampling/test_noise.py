"""Noise of a token is a function of five numbers, and what it draws has the distribution of the logits."""

import math

import torch

from ds_finetune.engine.sampling.noise import answer_keys, id_keys, log_uniform_noise, mix, sample_tokens

CPU = torch.device("cpu")


def test_mix_is_splitmix64() -> None:
    """The first number of the published generator with seed 0 (Java's SplittableRandom, Vigna's splitmix64.c)."""
    state = torch.tensor([0x9E3779B97F4A7C15 - 2**64])
    assert mix(state).item() % 2**64 == 0xE220A8397B1DCDAF


def test_tokens_have_the_probabilities_of_their_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf, -2.0])
    number = 40_000
    keys = answer_keys(3, [(1, 2, sample) for sample in range(number)], CPU)
    for position in (0, 1, 40):
        ids, log_probs = sample_tokens(logits.expand(number, -1), keys, id_keys(7, CPU), position=position)
        wanted = logits.softmax(-1) * number
        found = ids.bincount(minlength=7)
        assert found[5] == 0
        kept = wanted > 0
        chi_square = ((found - wanted)[kept] ** 2 / wanted[kept]).sum().item()
        # The 99.9 % quantile with five degrees of freedom is 20.5.
        assert chi_square < 20.5
        assert torch.equal(log_probs, logits.log_softmax(-1)[ids])


def test_noise_of_neighbouring_numbers_is_independent() -> None:
    """Of neighbouring seeds, rollouts, prompts, answers and ids: no correlation beyond chance."""
    numbers = [(key, prompt, sample) for key in range(10) for prompt in range(20) for sample in range(20)]
    noise = [-log_uniform_noise(answer_keys(seed, numbers, CPU), id_keys(5, CPU)) for seed in (0, 1)]
    series = torch.cat([part.T for part in noise]) - 1
    series = torch.cat([series, series.view(10, 10, 20, 20).transpose(1, 3).reshape(10, -1).roll(1, dims=1)])
    correlation = torch.corrcoef(series) - torch.eye(len(series))
    assert correlation.abs().max() < 4.5 / math.sqrt(len(numbers))
    assert abs(noise[0].mean() - 1) < 4 / math.sqrt(noise[0].numel())
    assert (noise[0] > 0).all()


def test_an_answer_depends_on_no_other_row() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    numbers = [(1, row, 0) for row in range(40)]
    ids, _ = sample_tokens(logits, answer_keys(3, numbers, CPU), id_keys(500, CPU), position=4)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    again = answer_keys(3, [numbers[row] for row in order], CPU)
    for rows in (order[:7], order[7:8], order[8:]):
        part = again[: len(rows)]
        again = again[len(rows) :]
        assert torch.equal(sample_tokens(logits[rows], part, id_keys(500, CPU), position=4)[0], ids[rows])


def test_seeds_and_numbers_may_be_large() -> None:
    keys = answer_keys(2**64 - 1, [(2**40, 2**62, 2**31)], CPU)
    ids, _ = sample_tokens(torch.zeros(1, 9), keys, id_keys(9, CPU), position=2**20)
    assert 0 <= ids.item() < 9
