"""Weights that ZeRO-3 makes whole on a rank, and for how long, by DeepSpeed 0.19.8.

File names below are those of deepspeed/runtime/zero.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ds_finetune.families.tensors import HEAD
from ds_finetune.plan.estimate.rows import Moment, Place
from ds_finetune.plan.estimate.states import TensorKind


class FetchingRules(NamedTuple):
    """Options of `zero_optimization` by which weights are fetched and kept, in elements."""

    prefetch_bucket: int
    max_live: int
    max_reuse: int
    persistence: int
    """Tensors with so many elements are whole all the time."""
    persistent_of_model: int


DEFAULT_RULES = FetchingRules(50_000_000, 1_000_000_000, 1_000_000_000, 100_000, 2**63 - 1)
"""Defaults of DeepSpeed 0.19.8, zero/config.py:113-251."""


_GLOO_THREADS = 2
"""Each receives weights in a buffer of its own, beside that in which they arrive (torch's ProcessGroupGloo.cpp)."""


class GatheredWeights(NamedTuple):
    """Elements that are whole on a rank at some moments at most, without those that always are."""

    during: str
    when: tuple[Moment, ...]
    numel: int
    arriving: int
    """Elements of the buffer in which several weights arrive; they are copied out of it."""


def arriving_copies(home: Place) -> int:
    """Buckets that arrive at a time on a rank whose device is there."""
    return _GLOO_THREADS if home == "host" else 1


def num_persistent(kinds: Sequence[TensorKind], rules: FetchingRules) -> int:
    """Elements of small weights, which every rank has whole all the time (parameter_offload.py:317), beside its
    part.
    """
    # partition_parameters.py:1292: a tensor with as many elements as the threshold is small.
    small = sum(kind.numel for kind in kinds if kind.numel // kind.count <= rules.persistence)
    return min(small, rules.persistent_of_model)


def gathered_weights(
    kinds: Sequence[TensorKind], rules: FetchingRules, *, passes: int, copies: int
) -> tuple[GatheredWeights, ...]:
    """What is whole of the `kinds` of a rank's weights, where forward and backward pass each layer `passes` times, and
    `copies` buckets arrive at a time.

    Each module that is entered fetches a bucket ahead (partitioned_param_coordinator.py:436-470), with or without
    weights of its own, until `max_live` elements are there; the last tensor, such as the embedding, may exceed it.
    Weights that are there when they are met ahead are kept until they are used (614-616), and so are those that are
    used again within `max_reuse` (621-630). So with a bucket above 0 as much is whole as may be.
    """
    fetched = [kind for kind in kinds if kind.numel // kind.count > rules.persistence]
    total, modules = sum(kind.numel for kind in fetched), _module_sizes(fetched)
    head = modules.pop(_module_of(HEAD), 0)
    largest = max(modules.values(), default=0)
    # Until a layer is passed again, forward and backward pass the head once each.
    near = max(rules.max_reuse - 2 * head, 0) // passes
    reused, ahead = near + largest, rules.max_live if rules.prefetch_bucket else 0
    with_head = min(total, max(reused + head, ahead + max(largest, head)))
    without_head = min(total - head, max(reused, ahead + largest))
    # A tensor that is fetched alone is not copied (partition_parameters.py:1607).
    smallest = min((kind.numel // kind.count for kind in fetched), default=0)
    bucket = rules.prefetch_bucket + max(largest, head) if rules.prefetch_bucket > smallest else 0
    bucket = min(bucket * copies, total)
    refetched = bucket if without_head < total - head else 0
    return (
        GatheredWeights("forward", ("forward",), with_head, bucket),
        GatheredWeights("head", ("head", "head backward"), with_head, 0),
        GatheredWeights("backward", ("layers", "embedding"), without_head, refetched),
    )


def _module_sizes(kinds: Sequence[TensorKind]) -> Counter[str]:
    """Elements of each module that has weights of its own, which are fetched together, by its name."""
    found: Counter[str] = Counter()
    for kind in kinds:
        found[_module_of(kind.name)] += kind.numel // kind.count
    return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
