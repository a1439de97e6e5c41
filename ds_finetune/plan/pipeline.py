"""Pipelines: in which order ranks compute micro-batches, and how long they wait."""

from typing import NamedTuple

from ds_finetune.config.sections import ParallelConfig


class PipelineTurn(NamedTuple):
    """A forward or a backward of one of a rank's chunks over one micro-batch; both are numbered from 0."""

    is_forward: bool
    chunk: int
    micro: int


def forwards_together(parallel: ParallelConfig) -> int:
    """The number of which the forwards of a step are a multiple."""
    return parallel.pp if parallel.vpp > 1 else 1


def idle_share(*, pp: int, vpp: int, micro_batches: int) -> float:
    """The share of a step that a rank waits, if all chunks take the same time (arXiv 2104.04473, section 2.2)."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)


def interleaved_turns(*, pp: int, vpp: int, micro_batches: int, rank: int) -> list[PipelineTurn]:
    """What pipeline rank `rank` computes in a step, in order: interleaved 1F1B (arXiv 2104.04473, section 2.2).

    Micro-batches, a multiple of `pp`, come in groups of `pp`: all of a group go through a chunk before the rank's next
    one. After `num_first_forwards` forwards, each forward is followed by a backward.
    """
    assert micro_batches % pp == 0, (micro_batches, pp)
    places = [divmod(number, pp * vpp) for number in range(micro_batches * vpp)]
    forwards = [PipelineTurn(True, within // pp, group * pp + within % pp) for group, within in places]
    backwards = [PipelineTurn(False, vpp - 1 - turn.chunk, turn.micro) for turn in forwards]
    first = num_first_forwards(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank)
    steady = [turn for pair in zip(forwards[first:], backwards, strict=False) for turn in pair]
    return [*forwards[:first], *steady, *backwards[len(forwards) - first :]]


def num_first_forwards(*, pp: int, vpp: int, micro_batches: int, rank: int) -> int:
    """Forwards of chunks on pipeline rank `rank` before forwards and backwards take turns."""
    if vpp == 1:
        return min(micro_batches, pp - rank - 1)
    return min(micro_batches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * pp)


def num_held_forwards(*, pp: int, vpp: int, micro_batches: int, rank: int) -> int:
    """The largest number of forwards of chunks whose activations pipeline rank `rank` holds at one time."""
    first = num_first_forwards(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank)
    return min(first + 1, micro_batches * vpp)
