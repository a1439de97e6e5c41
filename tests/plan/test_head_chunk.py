"""How many supervised tokens have logits at a time."""

import pytest

from ds_finetune.plan.head_chunk import head_chunk, head_line


@pytest.mark.parametrize(
    ("vocabulary", "precision", "device", "tokens"),
    [
        (129_280, "bf16", "cuda", 2048),
        (129_280, "fp32", "cuda", 4096),
        (32_000, "bf16", "cuda", 8192),
        (1_000_000, "bf16", "cuda", 1024),
        (129_280, "bf16", "cpu", 1024),
    ],
)
def test_a_gpu_takes_the_thousands_of_tokens_whose_logits_fit_two_gib(
    vocabulary: int, precision: str, device: str, tokens: int
) -> None:
    assert head_chunk(vocabulary, precision=precision, device=device) == tokens


def test_the_plan_states_their_memory() -> None:
    line = head_line(129_280, precision="bf16", device="cuda")
    assert line == ("head", "logits of 2,048 supervised tokens at a time, 1.48 GiB")
