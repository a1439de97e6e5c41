"""Which layers each pipeline stage holds, from the config.json of a model."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

from ds_finetune.config.schema import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.tensors import EMBEDDING, FINAL_NORM, HEAD, SCORE_HEAD, ModelTensors
from ds_finetune.plan.tensor_cuts import fused_experts_part


def stages_of(tensors: ModelTensors, parallel: ParallelConfig) -> tuple[range | None, ...]:
    """Layers of each pipeline stage: those of `pp_layers`, or balanced by parameters; one None without pipeline
    parallelism. Multi-token prediction layers are on the last one.

    ConfigError where a stage has no routed experts under expert parallelism: DeepSpeed 0.19.8 adds up norms over stages
    for each group of parameters (zero/stage_1_and_2.py:2951), and all stages must have the same number of groups.
    """
    if parallel.pp == 1:
        return (None,)
    if parallel.pp_layers:
        stages = [range(first, last) for first, last in pairwise(accumulate(parallel.pp_layers, initial=0))]
    else:
        stages = list(balance_layers(tuple(_layer_parameters(tensors, parallel.ep)), parallel.pp))
    stages[-1] = range(stages[-1].start, len(tensors.layers))
    have_experts = {number for number, kind in enumerate(tensors.layers) if kind.is_sparse}
    for stage, layers in enumerate(stages):
        if parallel.ep > 1 and not have_experts & set(layers):
            raise ConfigError(
                f"parallel.ep {parallel.ep}: stage {stage} of parallel.pp {parallel.pp}, layers {layers[0]} to "
                f"{layers[-1]}, has no routed experts",
                hint=f"layers {min(have_experts)} to {max(have_experts)} have them; set parallel.pp_layers, or a "
                "smaller parallel.pp",
            )
    return tuple(stages)


@lru_cache(maxsize=256)
def balance_layers(weights: tuple[int, ...], stages: int) -> tuple[range, ...]:
    """Consecutive layers for each of `stages`, at least one each, so that the largest sum of `weights` of a stage is
    minimal, and among these splits the sum of squares.
    """
    sums = [0, *accumulate(weights)]
    # By the number of parts: largest sum, sum of squares and ends of the best split of the first `end` layers.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {
        end: (sums[end], sums[end] ** 2, (end,)) for end in range(1, len(sums))
    }
    for parts in range(2, stages + 1):
        best = {end: _best_split(best, sums, parts=parts, end=end) for end in range(parts, len(sums))}
    ends = (0, *best[len(weights)][2])
    return tuple(range(first, last) for first, last in pairwise(ends))


def _best_split(
    best: dict[int, tuple[int, int, tuple[int, ...]]], sums: Sequence[int], *, parts: int, end: int
) -> tuple[int, int, tuple[int, ...]]:
    candidates = []
    for begin in range(end - 1, parts - 2, -1):
        last = sums[end] - sums[begin]
        largest, squares, ends = best[begin]
        candidates.append((max(largest, last), squares + last**2, (*ends, end)))
    return min(candidates)


def _layer_parameters(tensors: ModelTensors, ep_size: int) -> list[int]:
    """Parameters that a rank has of each layer; the embedding counts with the first layer, norm and head with the last.
    A tied head counts on both ends, and so does the embedding with multi-token prediction, whose layer counts with the
    last one.
    """
    of_kind = {
        kind: sum(prod(shape) // (ep_size if fused_experts_part(f".{name}") else 1) for name, shape in found.items())
        for kind, found in tensors.of_kind.items()
    }
    counts = [of_kind[kind] for kind in tensors.layers if not kind.is_prediction]
    predictions = [of_kind[kind] for kind in tensors.layers if kind.is_prediction]
    embedding = prod(tensors.ends[EMBEDDING])
    head = tensors.ends.get(HEAD) or tensors.ends.get(SCORE_HEAD)
    counts[0] += embedding
    counts[-1] += sum(predictions) + (embedding if predictions else 0)
    counts[-1] += prod(tensors.ends[FINAL_NORM]) + (prod(head) if head else embedding)
    return counts
