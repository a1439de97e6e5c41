"""Batch sizes: global batch = micro-batch x gradient accumulation steps x data parallel ranks. Also pipeline schedules,
which order the micro-batches of a step.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ds_finetune.config.sections import TrainConfig
from ds_finetune.errors import ConfigError
from ds_finetune.system.world import AccelerateChoices

AUTO = "auto"


def rows_of_forward(train: TrainConfig) -> int:
    """Rows that a rank computes in one forward: the micro-batch size, or 1 as long as `train.micro_batch_size: auto` is
    not resolved.
    """
    size = train.micro_batch_size
    return size if isinstance(size, int) else 1


@lru_cache(maxsize=4096)
def divisors(number: int, *, most: int | None = None) -> tuple[int, ...]:
    """Divisors of `number` that are at most `most`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(n for n in sorted({*small, *(number // n for n in small)}) if most is None or n <= most)


def legal_micro_batches(*, global_batch_size: int, dp: int, group: int = 1) -> tuple[int, ...]:
    """Legal micro-batch sizes, ascending. A size is legal if it divides the rows of each of the `dp` data
    parallel ranks into a number of forwards that is a multiple of `group`.
    """
    rows, rest = divmod(global_batch_size, dp * group)
    return () if rest else divisors(rows)


def check_auto(train: TrainConfig, tree: Mapping[str, Any], source: str, accelerate: AccelerateChoices | None) -> None:
    """Raise a ConfigError if `train.micro_batch_size` is `auto` but DeepSpeed's configuration or accelerate gives a
    micro-batch size or a number of accumulation steps.
    """
    if train.micro_batch_size != AUTO:
        return
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    chosen = {f"{source}: {key}": tree.get(key) for key in keys}
    if accelerate is not None:
        chosen["accelerate's gradient_accumulation_steps"] = accelerate.gradient_accumulation_steps
    for name, value in chosen.items():
        if value not in (None, AUTO):
            raise ConfigError(
                f"{name} {value!r} contradicts train.micro_batch_size auto, which chooses both the rows of a forward "
                "and how often they are accumulated",
                hint=f'write "auto" for {name} or leave {name} out, or give train.micro_batch_size a number',
            )


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Gradient accumulation steps on one rank. If the batch sizes do not divide, a ConfigError names the nearest legal
    global batch sizes.
    """
    rows_per_pass = micro_batch_size * dp
    steps, rest = divmod(global_batch_size, rows_per_pass)
    if rest:
        nearest = [n * rows_per_pass for n in (steps, steps + 1) if n]
        hint = f"set train.global_batch_size to {' or '.join(map(str, nearest))}"
        if global_batch_size % dp == 0:
            sizes = legal_micro_batches(global_batch_size=global_batch_size, dp=dp)[:8]
            hint += f"; or train.micro_batch_size {', '.join(map(str, sizes))}"
        if global_batch_size % micro_batch_size == 0:
            ranks = divisors(global_batch_size // micro_batch_size)
            hint += f"; or start {', '.join(map(str, ranks))} rank{'s' * (len(ranks) > 1)}"
        raise ConfigError(
            f"train.global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} "
            f"x dp {dp} = {rows_per_pass}",
            hint=hint,
        )
    return steps


class PipelineTurn(NamedTuple):
    """A forward or a backward of one micro-batch through one model chunk of a pipeline rank. `chunk` and `micro` count
    from 0.
    """

    is_forward: bool
    chunk: int
    micro: int


def idle_fraction(*, pp: int, vpp: int, micro_batches: int) -> float:
    """Share of a step that a pipeline rank is idle if model chunks take equal time (arXiv 2104.04473, section 2.2)."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)


def interleaved_turns(*, pp: int, vpp: int, micro_batches: int, rank: int) -> list[PipelineTurn]:
    """Forwards and backwards of pipeline rank `rank` in a step, in order: interleaved 1F1B (arXiv 2104.04473, section
    2.2).

    Micro-batches form groups of `pp`. The rank runs its first model chunk on the whole group, then its next chunk.
    After `num_first_forwards` forwards, each forward is followed by a backward.
    """
    assert micro_batches % pp == 0, (micro_batches, pp)
    positions = [divmod(number, pp * vpp) for number in range(micro_batches * vpp)]
    forwards = [PipelineTurn(True, within // pp, group * pp + within % pp) for group, within in positions]
    backwards = [PipelineTurn(False, vpp - 1 - turn.chunk, turn.micro) for turn in forwards]
    first = num_first_forwards(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank)
    steady = [turn for pair in zip(forwards[first:], backwards, strict=False) for turn in pair]
    return [*forwards[:first], *steady, *backwards[len(forwards) - first :]]


def num_first_forwards(*, pp: int, vpp: int, micro_batches: int, rank: int) -> int:
    """Warm-up forwards of pipeline rank `rank`, over all its model chunks, before forwards and backwards alternate."""
    if vpp == 1:
        return min(micro_batches, pp - rank - 1)
    return min(micro_batches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * pp)


def num_forwards_in_flight(*, pp: int, vpp: int, micro_batches: int, rank: int) -> int:
    """Maximum number of forwards, over all model chunks, whose activations pipeline rank `rank` holds at once."""
    first = num_first_forwards(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank)
    return min(first + 1, micro_batches * vpp)
