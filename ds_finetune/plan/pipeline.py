"""Pipelines: which layers each rank holds, in which order it computes them, and how long it waits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ds_finetune.config.parallel import ParallelConfig
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.mesh import Mesh

_OBJECTIVES = ("pretrain", "sft")
"""Objectives that are tested with several chunks a rank."""


@dataclass(frozen=True)
class StageLayers:
    """The layers that a pipeline rank holds: consecutive ones for each of its model chunks, in the model's order."""

    chunks: tuple[range, ...]

    def __contains__(self, layer: object) -> bool:
        """Whether the rank holds the layer with this number."""
        return any(layer in chunk for chunk in self.chunks)

    def __iter__(self) -> Iterator[int]:
        """The numbers of the layers, ascending."""
        return (layer for chunk in self.chunks for layer in chunk)

    def __str__(self) -> str:
        """As `0 to 3`, or `0 to 1 and 4 to 5` for two chunks."""
        return " and ".join(f"{chunk[0]} to {chunk[-1]}" for chunk in self.chunks)


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
    for what, hint in _untested(config):
        raise ConfigError(f"parallel.vpp {vpp} with {what} is not tested", hint=hint)
    if accumulation % pp:
        rows = config.train.micro_batch_size * mesh.dp
        legal = [str(rows * pp * n) for n in (accumulation // pp, accumulation // pp + 1) if n]
        raise ConfigError(
            f"parallel.vpp {vpp} computes micro-batches in groups of parallel.pp {pp}, and a step has {accumulation}: "
            f"train.global_batch_size {config.train.global_batch_size} / (micro_batch_size "
            f"{config.train.micro_batch_size} x dp {mesh.dp})",
            hint=f"set train.global_batch_size to {' or '.join(legal)}, or parallel.vpp to 1",
        )


def _untested(config: RunConfig) -> Iterator[tuple[str, str]]:
    hint = "set parallel.vpp to 1"
    if config.indexer.train:
        yield "indexer.train true", hint
    if config.lora is not None:
        yield "lora", hint
    if config.mtp.train:
        yield "mtp.train true", hint
    if config.router is not None:
        yield "`router`", hint
    if config.objective.name not in _OBJECTIVES:
        yield f"objective {config.objective.name}", hint
    if config.train.activation_offload:
        yield "train.activation_offload true", hint
    if config.train.tiled_mlp:
        yield "train.tiled_mlp true", hint


def layers_of_ranks(
    weights: Sequence[int], parallel: ParallelConfig, *, beyond: int = 0
) -> tuple[StageLayers | None, ...]:
    """The layers of each pipeline rank: those of `pp_layers`, or balanced by the `weights` of the layers, e.g. their
    parameters; (None,) without pipeline parallelism.

    The model is cut into pp x vpp chunks of consecutive layers, and rank r holds the chunks r, r + pp, r + 2 pp and so
    on (Narayanan et al., arXiv 2104.04473, section 2.2). The last chunk also has the layers `beyond` those that have a
    weight, which predict further tokens.
    """
    if parallel.pp == 1:
        return (None,)
    if parallel.pp_layers:
        chunks = [range(first, last) for first, last in pairwise(accumulate(parallel.pp_layers, initial=0))]
    else:
        chunks = balance_layers(weights, parallel.pp * parallel.vpp)
    chunks[-1] = range(chunks[-1].start, len(weights) + beyond)
    return tuple(StageLayers(tuple(chunks[rank :: parallel.pp])) for rank in range(parallel.pp))


def balance_layers(weights: Sequence[int], parts: int) -> list[range]:
    """Consecutive layers for each of `parts`, at least one each, so that the largest sum of `weights` of a part is
    minimal.
    """
    sums = [0, *accumulate(weights)]

    @cache
    def best(end: int, parts: int) -> tuple[int, int, tuple[int, ...]]:
        """Largest sum, sum of squares and ends of the best split of the first `end` layers into `parts`."""
        if parts == 1:
            return sums[end], sums[end] ** 2, (end,)
        candidates = []
        for begin in range(parts - 1, end):
            largest, squares, ends = best(begin, parts - 1)
            last = sums[end] - sums[begin]
            candidates.append((max(largest, last), squares + last**2, (*ends, end)))
        return min(candidates)

    return [range(first, last) for first, last in pairwise((0, *best(len(weights), parts)[2]))]


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
    """Forwards of pipeline rank `rank` before its first backward but one.

    A rank holds the activations of one chunk more than these, if it has a further forward.
    """
    return min(micro_batches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * pp)
