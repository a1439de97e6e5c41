"""Activation memory of a rank, as `trainer/tracing` measures it on the program's own modules."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class TracedLayer:
    """Activation bytes of one layer of the model in one forward."""

    kept: int
    """Bytes that a layer holds on the device from its forward to its backward, including its output."""
    forward: int
    """Peak bytes in the forward of the layer, without what earlier layers keep."""
    backward: int
    """Peak bytes in the backward of the layer, without what earlier layers keep."""
    on_host: int
    """Bytes that the layer holds in host memory from its forward to its backward."""


@dataclass(frozen=True)
class TracedModel:
    """Activation bytes of one forward on a rank with all layers; weights and gradients do not count."""

    layers: tuple[TracedLayer, ...]
    """Layers in the order of execution; multi-token prediction layers count as part of the head."""
    hidden: int
    """Bytes of the hidden states that one layer passes to the next."""
    before: int
    """Bytes of embeddings and positions, held when the first layer begins."""
    embedding: int
    """Peak bytes while embeddings are computed, before the first layer."""
    head: int
    """Peak bytes from the last layer to the loss, in addition to what layers keep."""
    head_backward: int
    """Peak bytes in the backward of the head, in addition to what layers keep."""
    embedding_backward: int
    """Peak bytes in the gradient of the embedding, after the backward of the layers."""
    teacher: int
    """Peak bytes in the forward of a teacher; 0 without one."""

    def layers_of(self, numbers: Iterable[int]) -> tuple[TracedLayer, ...]:
        """Activation bytes of the layers with these numbers. Multi-token prediction layers are left out, because `head`
        includes theirs.
        """
        return tuple(self.layers[number] for number in numbers if number < len(self.layers))

    def kept(self, layers: Iterable[TracedLayer] | None = None) -> int:
        """Bytes that `layers` (default: all) keep until their backward, plus `before`."""
        return self.before + sum(layer.kept for layer in (self.layers if layers is None else layers))

    def forward_peak(self, layers: Iterable[TracedLayer] | None = None) -> int:
        """Peak bytes in the forward of `layers` (default: all)."""
        return self._peak((layer.kept, layer.forward) for layer in (self.layers if layers is None else layers))

    def backward_peak(self, layers: Iterable[TracedLayer] | None = None) -> int:
        """Peak bytes in the backward of `layers` (default: all)."""
        return self._peak((layer.kept, layer.backward) for layer in (self.layers if layers is None else layers))

    def _peak(self, each: Iterable[tuple[int, int]]) -> int:
        total = most = self.before
        for kept, own in each:
            most = max(most, total + own)
            total += kept
        return most

    @property
    def peak(self) -> int:
        """Peak activation bytes of a forward and backward on a rank with all layers and the head."""
        kept = self.kept()
        ends = kept + self.head, kept + self.head_backward, self.embedding, self.embedding_backward, self.teacher
        return max(*ends, self.forward_peak(), self.backward_peak())


Tracer = Callable[[Plan], TracedModel]
"""Function that traces the model of a planned run and returns its activation bytes."""


def without_activations(model: DescribedModel) -> Tracer:
    """A tracer that reports no activations. An estimate with it counts only states and is a lower bound of a run's
    memory.
    """
    layers = len(model.tensors.layers) - model.tensors.num_predictions
    traced = TracedModel((TracedLayer(0, 0, 0, 0),) * layers, 0, 0, 0, 0, 0, 0, 0)
    return lambda plan: traced


def by_rows(traces: Tracer) -> Tracer:
    """A tracer that traces only forwards of one and two rows, and extrapolates linearly to more rows. Its result is
    exact, but where the head computes logits in chunks it is an upper bound.
    """

    def trace(plan: Plan) -> TracedModel:
        one, two = (traces(plan.with_rows(rows)) for rows in (1, 2))
        return _extended(one, two, plan.micro_batch_size)

    return trace


def _extended(one: TracedModel, two: TracedModel, rows: int) -> TracedModel:

    def numbers(first: Any, second: Any) -> dict[str, Any]:  # noqa: ANN401 - a layer or a model
        names = (each.name for each in fields(first) if each.name != "layers")
        pairs = {name: (getattr(first, name), getattr(second, name)) for name in names}
        return {name: start + (end - start) * (rows - 1) for name, (start, end) in pairs.items()}

    alike = {pair: TracedLayer(**numbers(*pair)) for pair in dict.fromkeys(zip(one.layers, two.layers, strict=True))}
    layers = tuple(alike[pair] for pair in zip(one.layers, two.layers, strict=True))
    return TracedModel(layers=layers, **numbers(one, two))
