"""Pipelines: in which order ranks compute micro-batches, how long they wait, and settings that do not go together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_finetune.config.indexer import IndexerConfig
from ds_finetune.config.parallel import ParallelConfig
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.mesh import Mesh


class PipelineTurn(NamedTuple):
    """A forward or a backward of one of a rank's chunks over one micro-batch; both are numbered from 0."""

    is_forward: bool
    chunk: int
    micro: int


def check_chunks(pp: int, vpp: int, *, layers: int, given: Sequence[int]) -> None:
    """ConfigError where a model's `layers` cannot be cut into `pp` x `vpp` chunks, or not as `given`."""
    if pp > layers:
        raise ConfigError(
            f"parallel.pp {pp} is more than the {layers} layers of the model", hint=f"set it to {layers} at most"
        )
    if pp * vpp > layers:
        raise ConfigError(
            f"parallel.pp {pp} x parallel.vpp {vpp} = {pp * vpp} chunks are more than the {layers} layers of the model",
            hint=f"set parallel.vpp to {layers // pp} at most",
        )
    if given and (len(given) != pp * vpp or sum(given) != layers or min(given) < 1):
        parts = f"{pp} stages" if vpp == 1 else f"{pp} x {vpp} chunks"
        raise ConfigError(
            f"parallel.pp_layers {list(given)} does not share out {layers} layers over {parts}",
            hint=f"name {pp * vpp} numbers of at least 1 whose sum is {layers}, or leave it out",
        )


def check_interleaving(mesh: Mesh, config: RunConfig, *, accumulation: int) -> None:
    """ConfigError where ranks cannot hold several chunks with these settings, or no test compares it with a plain
    loop.
    """
    pp, vpp = mesh.pp, config.parallel.vpp
    if vpp == 1:
        return
    if pp == 1:
        raise ConfigError(f"parallel.vpp {vpp} with parallel.pp 1", hint="set parallel.pp, or leave parallel.vpp out")
    for what, hint in _untested(config.indexer):
        raise ConfigError(f"parallel.vpp {vpp} with {what} is not tested", hint=hint)
    if accumulation % pp:
        rows = rows_of_forward(config.train) * mesh.dp
        legal = [str(rows * pp * n) for n in (accumulation // pp, accumulation // pp + 1) if n]
        raise ConfigError(
            f"parallel.vpp {vpp} computes micro-batches in groups of parallel.pp {pp}, and a step has {accumulation}: "
            f"train.global_batch_size {config.train.global_batch_size} / (micro_batch_size "
            f"{rows_of_forward(config.train)} x dp {mesh.dp})",
            hint=f"set train.global_batch_size to {' or '.join(legal)}, or parallel.vpp to 1",
        )


def forwards_together(parallel: ParallelConfig) -> int:
    """The number of which the forwards of a step are a multiple."""
    return parallel.pp if parallel.vpp > 1 else 1


def _untested(indexer: IndexerConfig) -> Iterator[tuple[str, str]]:
    if indexer.train:
        yield "indexer.train true", "set parallel.vpp to 1"


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
