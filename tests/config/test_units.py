import pytest

from ds_finetune.config.units import parse_bytes, share_text
from ds_finetune.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 * 2**20), ("1.5TB", 1500 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, name="export.max_shard_size") == size


def test_a_text_that_is_no_size() -> None:
    with pytest.raises(ConfigError, match=r"export\.max_shard_size `5 apples` is not a size with a unit"):
        parse_bytes("5 apples", name="export.max_shard_size")


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.99966, 1, ">99.9%"),
        (0.99966, 2, "99.97%"),
        (0.9994, 1, "99.9%"),
        (1.0, 1, "100.0%"),
        (0.0, 1, "0.0%"),
        (0.0003, 1, "<0.1%"),
        (0.533, 1, "53.3%"),
        (-0.25, 1, "-25.0%"),
    ],
)
def test_a_share_is_not_rounded_to_all_or_nothing(share: float, digits: int, text: str) -> None:
    assert share_text(share, digits) == text
