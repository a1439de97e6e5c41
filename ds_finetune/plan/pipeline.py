"""Pipeline schedules: the order in which ranks compute micro-batches, and their idle time."""

from typing import NamedTuple

from ds_finetune.config.sections import ParallelConfig


class PipelineTurn(NamedTuple):
    """Forward or backward of one micro-batch through one of a rank's chunks; `chunk` and `micro` count from 0."""

    is_forward: bool
    chunk: int
    micro: int


def forwards_multiple(parallel: ParallelConfig) -> int:
    """The number of forwards in a step must be a multiple of this number, which is above 1 for interleaved pipeline
    stages.
    """
    return parallel.pp if parallel.vpp > 1 else 1


def idle_fraction(*, pp: int, vpp: int, micro_batches: int) -> float:
    """Share of a step that a rank is idle if all chunks take equal time (arXiv 2104.04473, section 2.2)."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)


def interleaved_turns(*, pp: int, vpp: int, micro_batches: int, rank: int) -> list[PipelineTurn]:
    """Turns of pipeline rank `rank` in a step, in order: interleaved 1F1B (arXiv 2104.04473, section 2.2).

    Micro-batches, a multiple of `pp`, form groups of `pp`: all of a group pass one chunk before the rank's next chunk.
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
    """Warm-up forwards of pipeline rank `rank`, over all its chunks, before forwards and backwards alternate."""
    if vpp == 1:
        return min(micro_batches, pp - rank - 1)
    return min(micro_batches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * pp)


def num_forwards_in_flight(*, pp: int, vpp: int, micro_batches: int, rank: int) -> int:
    """Maximum number of forwards, over all chunks, whose activations pipeline rank `rank` holds at once."""
    first = num_first_forwards(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank)
    return min(first + 1, micro_batches * vpp)
