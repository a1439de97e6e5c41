"""Several chunks of layers on one pipeline rank, of which a forward of the interleaved schedule runs one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.model.parallel.pipeline import MissingLayer, PipelineGroup, missing_layer


class HandOver(MissingLayer):
    """Replaces a layer of another rank beside a chunk of this one, in forwards that run all chunks.

    Such forwards have no gradient. One micro-batch is under way, so a send waits only for a rank that is about to
    receive.
    """

    def __init__(self, missing: MissingLayer, pp_group: PipelineGroup) -> None:
        super().__init__(missing.layer, has_choice=missing.has_choice)
        self.pp_group = pp_group
        self.sends = self.receives = False

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, None]:  # noqa: ANN401
        """Send `hidden` after the chunk before this layer, and return what arrives for the chunk after it."""
        assert not torch.is_grad_enabled(), "the schedule sends and receives where there are gradients"
        if self.sends:
            self.pp_group.send(hidden, to=self.pp_group.next_rank)
        if self.receives:
            hidden = self.pp_group.receive(torch.empty_like(hidden), source=self.pp_group.previous_rank)
        return super().forward(hidden, *args, **kwargs)


class ModelChunks:
    """The chunks of `lm` on a rank of `pp_group`, after `install_pipeline_stage`.

    Forwards outside `only` run all chunks in their order, and pass hidden states around the ranks.
    """

    def __init__(self, lm: PreTrainedModel, pp_group: PipelineGroup, chunks: Sequence[range]) -> None:
        self._base: Any = lm.base_model
        self._norms = [self._base.norm] * len(chunks)
        if pp_group.is_last:
            self._norms[:-1] = [nn.Identity() for _ in chunks[1:]]
        self._layers = [
            nn.ModuleList(
                layer if number in chunk else missing_layer(lm.config, number)
                for number, layer in enumerate(self._base.layers)
            )
            for chunk in chunks
        ]
        for before, after in pairwise(chunks):
            self._hand_over(before.stop, pp_group).sends = True
            self._hand_over(after.start - 1, pp_group).receives = True

    @contextmanager
    def only(self, chunk: int) -> Iterator[None]:
        """While this is open, the model has the layers of this chunk alone, and the norm after the last one.

        What activation checkpointing computes again calls layers themselves, so backward may run outside.
        """
        layers, norm = self._base.layers, self._base.norm
        self._base.layers, self._base.norm = self._layers[chunk], self._norms[chunk]
        try:
            yield
        finally:
            self._base.layers, self._base.norm = layers, norm

    def _hand_over(self, layer: int, pp_group: PipelineGroup) -> HandOver:
        found = self._base.layers[layer]
        if not isinstance(found, HandOver):
            self._base.layers[layer] = found = HandOver(found, pp_group)
        return found
