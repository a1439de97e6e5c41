"""Activations of a rank, as `trainer/tracing` reads them off the program's own modules."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class TracedLayer:
    """Bytes of one layer for the rows of a forward."""

    kept: int
    """Bytes on the device from its forward to its backward, with its output."""
    forward: int
    """Bytes at most in its forward, beside what earlier layers keep."""
    backward: int
    """Bytes at most in its backward, beside what earlier layers keep."""
    on_host: int
    """Bytes in host memory from its forward to its backward."""


@dataclass(frozen=True)
class TracedModel:
    """What the activations of a model take on a rank that holds all layers, for the rows of one forward; weights and
    their gradients are not among them.
    """

    layers: tuple[TracedLayer, ...]
    """Layers in the order in which they run; prediction layers are part of the head."""
    hidden: int
    """Bytes of the hidden states between two layers."""
    before: int
    """Bytes that are held when the first layer begins: embeddings and positions."""
    embedding: int
    """Bytes at most before that."""
    head: int
    """Bytes at most from the last layer to the loss, beside what layers keep."""
    head_backward: int
    """Bytes at most in the backward of the head, beside what layers keep."""
    embedding_backward: int
    """Bytes at most after the backward of layers."""
    teacher: int
    """Bytes at most in the forward of a teacher; 0 without one."""

    def layers_of(self, numbers: Iterable[int]) -> tuple[TracedLayer, ...]:
        """The layers with these numbers, without prediction layers."""
        return tuple(self.layers[number] for number in numbers if number < len(self.layers))

    def kept(self, layers: Iterable[TracedLayer] | None = None) -> int:
        """Bytes that layers keep until their backward, and that are held before the first."""
        return self.before + sum(layer.kept for layer in (self.layers if layers is None else layers))

    def forward_peak(self, layers: Iterable[TracedLayer] | None = None) -> int:
        """Bytes at most in the forward of layers."""
        return self._peak((layer.kept, layer.forward) for layer in (self.layers if layers is None else layers))

    def backward_peak(self, layers: Iterable[TracedLayer] | None = None) -> int:
        """Bytes at most in the backward of layers."""
        return self._peak((layer.kept, layer.backward) for layer in (self.layers if layers is None else layers))

    def _peak(self, each: Iterable[tuple[int, int]]) -> int:
        held = most = self.before
        for kept, own in each:
            most = max(most, held + own)
            held += kept
        return most

    @property
    def peak(self) -> int:
        """Bytes at most on a rank that holds all layers and the head."""
        kept = self.kept()
        ends = kept + self.head, kept + self.head_backward, self.embedding, self.embedding_backward, self.teacher
        return max(*ends, self.forward_peak(), self.backward_peak())


Tracer = Callable[[Plan], TracedModel]
"""From the plan of a run to the activations of its model in that layout."""


def by_rows(traces: Tracer) -> Tracer:
    """Traces of which only those of forwards of one and two rows are computed: others follow, as they are linear in the
    rows but for chunks of the head, of which they have at least as much.
    """

    def trace(plan: Plan) -> TracedModel:
        one, two = (traces(replace(plan, batch=replace(plan.batch, micro_batch_size=rows))) for rows in (1, 2))
        return _extended(one, two, plan.batch.micro_batch_size)

    return trace


def _extended(one: TracedModel, two: TracedModel, rows: int) -> TracedModel:
    """What forwards of so many rows take, after those of one and two."""

    def numbers(first: Any, second: Any) -> dict[str, Any]:  # noqa: ANN401 - a layer or a model
        names = (each.name for each in fields(first) if each.name != "layers")
        pairs = {name: (getattr(first, name), getattr(second, name)) for name in names}
        return {name: start + (end - start) * (rows - 1) for name, (start, end) in pairs.items()}

    alike = {pair: TracedLayer(**numbers(*pair)) for pair in dict.fromkeys(zip(one.layers, two.layers, strict=True))}
    layers = tuple(alike[pair] for pair in zip(one.layers, two.layers, strict=True))
    return TracedModel(layers=layers, **numbers(one, two))
