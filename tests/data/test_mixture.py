"""Sources mixed by weight: exact counts, evenly spread, and a pure function of the position."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from ds_finetune.cli.demo import write_demo
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.batches import BatchPlan, Position, training_batches
from ds_finetune.data.mixture import Mixture
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import DataError
from tests.planning import NumberedRows

MIXTURES = [
    Mixture.of({"a": 0.9, "b": 0.1}, [90, 1000]),
    Mixture.of({"a": 7, "b": 3}, [20, 2]),
    Mixture.of({"a": 1, "b": 1, "c": 1}, [5, 17, 3]),
    Mixture.of({"a": 0.5, "b": 0.2, "c": 0.3}, [11, 400, 1]),
    Mixture.of({"a": 1}, [6]),
]
SETTINGS = list(product(MIXTURES, (False, True)))


def sequence(mixture: Mixture, epochs: int, *, shuffle: bool) -> np.ndarray:
    return np.concatenate([mixture.order(seed=3, epoch=epoch, shuffle=shuffle) for epoch in range(epochs)])


def sources_of(mixture: Mixture, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(mixture.sizes), rows, side="right")


def test_an_epoch_is_one_pass_over_the_source_with_the_largest_weight() -> None:
    assert [mixture.draws for mixture in MIXTURES] == [(90, 10), (20, 9), (17, 17, 17), (11, 4, 7), (6,)]
    with pytest.raises(
        DataError, match=r"gives `b` a share of 0\.990%, which is less than one row in an epoch of 40 rows"
    ):
        Mixture.of({"a": 1, "b": 0.01}, [40, 5])


@pytest.mark.parametrize(("mixture", "shuffle"), SETTINGS)
def test_sources_have_their_shares_of_every_stretch(mixture: Mixture, shuffle: bool) -> None:
    """Exactly over each epoch; within one, to less than a row for two sources and a bound that is known for more."""
    length = mixture.rows_per_epoch
    for epoch in range(3):
        drawn = sources_of(mixture, mixture.order(seed=3, epoch=epoch, shuffle=shuffle))
        assert tuple(np.bincount(drawn, minlength=len(mixture.draws))) == mixture.draws
        for source, draw in enumerate(mixture.draws):
            share, so_far = draw / length, np.cumsum(drawn == source)
            bound = 1 + max(len(mixture.draws) - 2, 0) * share
            assert np.abs(so_far - share * np.arange(1, length + 1)).max() < bound + 1e-9


@pytest.mark.parametrize(("mixture", "shuffle"), SETTINGS)
def test_every_row_of_a_source_comes_before_any_comes_again(mixture: Mixture, shuffle: bool) -> None:
    """Also where a pass ends in the middle of an epoch, and begins in the middle of one."""
    rows = sequence(mixture, 7, shuffle=shuffle)
    first = 0
    for size in mixture.sizes:
        mine = rows[(rows >= first) & (rows < first + size)] - first
        passes = [mine[start : start + size] for start in range(0, len(mine), size)]
        assert all(len(set(found.tolist())) == len(found) for found in passes)
        if not shuffle:
            assert all(found.tolist() == list(range(len(found))) for found in passes)
        elif size > 5:
            assert all(before.tolist() != after.tolist() for before, after in pairwise(passes))
        first += size
    counts = mixture.count_rows(len(rows) - 5, seed=3, shuffle=shuffle)
    assert counts == np.bincount(sources_of(mixture, rows[:-5]), minlength=len(mixture.sizes)).tolist()


@pytest.mark.parametrize(("dp", "micro"), [(1, 8), (2, 2), (4, 1)])
def test_batches_do_not_depend_on_ranks_and_resume_at_any_step(dp: int, micro: int) -> None:
    mixture = MIXTURES[3]
    rows, total = NumberedRows(sum(mixture.sizes)), 3 * mixture.rows_per_epoch + 4
    plans = [
        BatchPlan(8, micro, rank, dp, 3, shuffle=True, pad_token_id=0, row_len=None, mixture=mixture)
        for rank in range(dp)
    ]
    parts = [list(training_batches(rows, plan, start_step=0, total_rows=total)) for plan in plans]
    wanted = sequence(mixture, 4, shuffle=True)[:total].tolist()
    assert [i for step in zip(*parts, strict=True) for batch in step for i in batch.row_ids] == wanted
    for start in range(len(parts[0])):
        again = [list(training_batches(rows, plan, start_step=start, total_rows=total)) for plan in plans]
        assert [[batch.row_ids for batch in part] for part in again] == [
            [batch.row_ids for batch in part[start:]] for part in parts
        ]
    assert parts[0][2].position == Position(*divmod(24, mixture.rows_per_epoch))
    assert parts[0][-1].position == Position(3, 4)


def write(path: Path, name: str, lengths: Sequence[int]) -> str:
    file = path / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": name * length}) + "\n" for length in lengths))
    return str(file)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_files_have_their_shares(tmp_path: Path, packing: bool) -> None:
    """A row has documents of one file, and the shares are those of the tokens that are trained."""
    write_demo(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    weights = {write(tmp_path, "a", [9] * 40): 3, write(tmp_path, "b", [19] * 7): 1}
    config = DataConfig.model_validate({"train": weights, "packing": packing, "cache_dir": str(tmp_path / "cache")})
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(20, 128))
    assert rows.mixture is not None
    assert (rows.mixture.sizes, rows.mixture.draws) == (((20, 7), (20, 7)) if packing else ((40, 7), (40, 13)))
    assert rows.rows_per_epoch == sum(rows.mixture.draws)
    plan = BatchPlan(8, 2, 0, 1, 0, shuffle=True, pad_token_id=0, row_len=None, mixture=rows.mixture)
    found: Counter[str] = Counter()
    for batch in training_batches(rows, plan, start_step=0, total_rows=2 * rows.rows_per_epoch):
        for number in batch.row_ids:
            letters = set(tokenizer.decode(rows[number].input_ids, skip_special_tokens=True))
            assert len(letters) == 1, "a row has documents of one file"
            found.update({letters.pop(): rows[number].supervised})
    a, b = rows.mixture.draws
    per_row = 2 * 9 if packing else 9
    assert found == {"a": 2 * a * per_row, "b": 2 * b * 19}
    assert rows.tokens_per_epoch == pytest.approx(a * (20 if packing else 10) + b * 20)
    again = prepare_rows(
        config.model_copy(update={"train": dict.fromkeys(weights, 1.0)}),
        "train",
        tokenizer=tokenizer,
        limits=TokenLimits(20, 128),
    )
    assert again.fingerprint() != rows.fingerprint()
    plain = prepare_rows(
        config.model_copy(update={"train": tuple(weights)}),
        "train",
        tokenizer=tokenizer,
        limits=TokenLimits(20, 128),
    )
    assert plain.mixture is None
    assert plain.rows_per_epoch == len(plain)
