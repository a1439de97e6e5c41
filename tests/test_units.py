import pytest

from ds_finetune.errors import ConfigError
from ds_finetune.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 * 2**20), ("1.5TB", 1500 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, name="export.max_shard_size") == size


def test_a_text_that_is_no_size() -> None:
    with pytest.raises(ConfigError, match=r"export\.max_shard_size `5 apples` is no number with a unit"):
        parse_bytes("5 apples", name="export.max_shard_size")
