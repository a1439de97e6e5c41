"""Measures activations and FLOPs in one forward and backward pass of the program's own modules on fake tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.tracing.kernels import Recorder, counted_attention
from ds_finetune.trainer.tracing.short_model import ShortModel


def trace(plan: Plan, model: ModelPlan, *, is_full: bool = False) -> TracedModel:
    """Trace the activations of `model` for one micro-batch, on a rank of the run that `plan` describes.

    The trace assumes that rows are full, that a row is one document or a pair of two, that all tokens are supervised,
    and that experts are chosen equally often. `is_full` computes all layers instead of two of each kind, with the same
    result.
    """
    with ShortModel(plan, model, is_full=is_full) as short:
        traced = _watched(short).result(short.kinds)
    return traced if model.teacher else replace(traced, teacher=0)


def count_flops(plan: Plan, model: ModelPlan, *, is_full: bool = False) -> int:
    """FLOPs of forward and backward of one micro-batch of `plan`, with the assumptions of `trace`. Frozen weights get
    no gradients, and the forward of a teacher is not counted. Without recomputation and parallel axes in `plan` these
    are the model FLOPs.
    """
    with ShortModel(plan, model, is_full=is_full) as short, counted_attention(short.recorder):
        return _watched(short).flops(short.kinds)


def _watched(short: ShortModel) -> "_Watch":
    watch = _Watch(short.recorder, short.lm.base_model, [short.lm.get_submodule(name) for name in short.layers])
    with short.recorder, watch:
        loss = short.trained(short.rows, short.numbers).loss
        watch.begin_backward()
        loss.backward()
    return watch


class _Mark(NamedTuple):
    """Counts of bytes and FLOPs at the beginning of a part of an optimizer step."""

    part: str
    """`start`, `embedding`, `forward` or `backward` of a layer, `head`, `loss` or `inputs`."""
    layer: int
    peak: int
    """Peak bytes since the previous mark."""
    held: int
    on_host: int
    flops: int


class _Watch:
    """Context in which hooks of modules read the recorder's counts at the beginning of each part of a step."""

    def __init__(self, recorder: Recorder, base: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._recorder, self._base = recorder, base
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._hooks = ExitStack()
        self._marks = list[_Mark]()
        self._has_left_layers = self._is_backward = False
        self._hidden = 0

    def __enter__(self) -> None:
        self._hooks.callback(register_module_forward_pre_hook(self._before).remove)
        self._hooks.callback(register_module_forward_hook(self._after, always_call=True).remove)
        self._mark("start")

    def __exit__(self, *error: object) -> None:
        self._mark("end")
        self._hooks.close()

    def begin_backward(self) -> None:
        self._mark("loss")
        self._is_backward = True

    def _mark(self, part: str, layer: int = -1) -> None:
        own = self._recorder
        self._marks.append(_Mark(part, layer, own.since_mark(), own.held, own.on_host, own.flops))

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        number = self._numbers.get(module)
        if self._is_backward:
            return
        if number is not None:
            self._mark("forward", number)
            hidden: torch.Tensor = arguments[0]
            assert self._hidden in (0, hidden.nbytes), "hidden states between layers are not of one size"
            self._hidden = hidden.nbytes
            if number == 0 and hidden.requires_grad:
                hidden.register_hook(lambda _: self._mark("inputs"))
        elif module is self._base:
            self._mark("embedding")
        elif self._has_left_layers:
            self._has_left_layers = False
            self._mark("head")

    def _after(self, module: nn.Module, _: object, out: Any) -> None:  # noqa: ANN401
        number = self._numbers.get(module)
        if self._is_backward or number is None or out is None:
            # A forward pass that raised an error has no output.
            return
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._mark("backward", number))
        self._has_left_layers = number == len(self._numbers) - 1

    def result(self, representatives: Sequence[int]) -> TracedModel:
        """Traced activation bytes of all layers. Layer i of the model gets the bytes of the traced layer
        `representatives[i]`.
        """
        parts = {(mark.part, mark.layer): (mark, then) for mark, then in pairwise(self._marks)}
        layers = [self._layer(parts, number) for number in range(len(self._numbers))]
        begin, last = parts["forward", 0][0].held, parts["head", -1][0].held

        def most(part: str, beside: int = 0) -> int:
            return parts[part, -1][1].peak - beside if (part, -1) in parts else 0

        return TracedModel(
            layers=tuple(layers[number] for number in representatives),
            hidden=self._hidden,
            before=begin,
            teacher=most("start"),
            embedding=most("embedding"),
            head=most("head", last),
            head_backward=most("loss", last),
            embedding_backward=most("inputs"),
        )

    def flops(self, representatives: Sequence[int]) -> int:
        """FLOPs of all layers, and of embedding, head and loss. `representatives` are as in `result`."""
        of_layers, others = Counter[int](), 0
        for mark, then in pairwise(self._marks):
            if mark.layer >= 0:
                of_layers[mark.layer] += then.flops - mark.flops
            elif mark.part != "start":
                others += then.flops - mark.flops
        return others + sum(of_layers[number] for number in representatives)

    def _layer(self, parts: Mapping[tuple[str, int], tuple[_Mark, _Mark]], number: int) -> TracedLayer:
        begin, after = parts["forward", number]
        both = [parts["forward", number], *([parts["backward", number]] if ("backward", number) in parts else [])]
        return TracedLayer(
            kept=after.held - begin.held,
            forward=after.peak - begin.held,
            backward=both[1][1].peak - begin.held if len(both) > 1 else 0,
            on_host=after.on_host - begin.on_host,
        )
