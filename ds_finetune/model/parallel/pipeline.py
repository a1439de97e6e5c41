"""Pipeline parallelism: each rank holds consecutive layers of a model and hands hidden states on (Huang et al., GPipe,
arXiv 1811.06965).

A stage is the whole Hugging Face model with what other stages hold taken out, so its tensors keep their names. All
ranks of a pipeline read the same rows: positions, documents and labels are known on every stage, and hidden states
alone travel.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from ds_finetune.config.schema import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.model.build import build_skeleton
from ds_finetune.model.parallel.rank_group import RankGroup
from ds_finetune.patches.transformers_models import replaced_layers

T = TypeVar("T")
_EXPERTS = re.compile(r"mlp\.experts\.")
"""Routed experts, by their names within a layer."""


class StageGroup(RankGroup):
    """Ranks that hold a model's layers, in order; rank i is stage i."""

    ends: dist.ProcessGroup | None = None
    """The ranks that hold the same part of the first and of the last stage, whatever rows they read; None on stages
    between.
    """
    arrived: torch.Tensor | None = None
    """Hidden states that came from the stage before for the forward done last; a leaf that takes a gradient where
    gradients are on.
    """

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.place == self.size - 1

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send to stage `to`, which receives it."""
        dist.send(tensor.detach().contiguous(), group=self.group, group_dst=to)

    def receive(self, into: torch.Tensor, *, source: int) -> torch.Tensor:
        """Fill `into` with what stage `source` sends."""
        dist.recv(into, group=self.group, group_src=source)
        return into

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the last stage has, on every stage; `tensor` is that there and room for it elsewhere."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=self.size - 1)
        return tensor

    def all_gather_object(self, mine: T) -> list[T]:
        """A plain value of every stage, by stage."""
        found = [mine] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def add_other_end(self, grad: torch.Tensor) -> None:
        """Make the gradient of a weight that the first and the last stage hold the sum of both ends, averaged over the
        ranks that read other rows.

        Bit for bit the same on all of them, so that a reduction of it is too, in whatever order it adds: elsewhere
        the two copies would drift apart, as the place of an element in a bucket decides the order.
        """
        dist.all_reduce(grad, group=self.ends)
        grad /= dist.get_world_size(self.ends) // 2

    def close(self) -> None:
        """Let go of the process groups."""
        super().close()
        self.ends = None


class Absent(nn.Module):
    """A layer that another stage holds."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, *_: Any, past_key_values: Cache | None = None, **__: Any) -> torch.Tensor:  # noqa: ANN401
        """Hidden states as they are; a cache is told of the tokens, whose number it is asked for by its first layer."""
        if past_key_values is not None:
            # One number a token: with none it would count as empty (transformers 5.23, cache_utils.py, get_seq_length).
            token = hidden[:, None, :, :1]
            past_key_values.update(token, token, self.layer)
        return hidden


class Received(nn.Embedding):
    """Stands for the embedding on later stages: hidden states come from the stage before. A tied head keeps the weight
    here.
    """

    stage: StageGroup
    dtype: torch.dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] -> [batch, tokens, width]."""
        room = torch.empty(*input_ids.shape, self.embedding_dim, dtype=self.dtype, device=input_ids.device)
        self.stage.arrived = self.stage.receive(room, source=self.stage.place - 1).requires_grad_(
            torch.is_grad_enabled()
        )
        return self.stage.arrived


class HandedOn(nn.Module):
    """Stands for the last norm on earlier stages: hidden states go on at once where no gradient is to come back, else
    when the schedule says.
    """

    def __init__(self, stage: StageGroup) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states as they are."""
        if not torch.is_grad_enabled():
            self.stage.send(hidden, to=self.stage.place + 1)
        return hidden


class Awaited(nn.Linear):
    """Stands for the head on earlier stages, which get the logits of the last one to choose the same next token."""

    stage: StageGroup
    vocabulary: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> logits [..., vocabulary]."""
        return self.stage.from_last(hidden.new_empty(*hidden.shape[:-1], self.vocabulary))


def stage_layers(weights: Sequence[int], stages: int) -> list[range]:
    """Consecutive layers for each of `stages`, none without one, so that the largest sum of `weights` is as small as
    can be.
    """
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(end: int, parts: int) -> tuple[int, int, tuple[int, ...]]:
        """Largest sum, sum of squares and ends of the best cut of the first `end` layers."""
        if parts == 1:
            return sums[end], sums[end] ** 2, (end,)
        found = []
        for cut in range(parts - 1, end):
            largest, squares, ends = best(cut, parts - 1)
            last = sums[end] - sums[cut]
            found.append((max(largest, last), squares + last**2, (*ends, end)))
        return min(found)

    ends = (0, *best(len(weights), stages)[2])
    return [range(first, last) for first, last in pairwise(ends)]


def without_memory(hf_config: PretrainedConfig) -> PreTrainedModel:
    """The modules of the whole model on the meta device."""
    return build_skeleton(copy.deepcopy(hf_config), attention="eager", dtype=torch.bfloat16, device="meta")


def stages_of(hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[range | None]:
    """Layers of each pipeline stage, those of `pp_layers` or balanced by parameters; None where one rank holds all.

    ConfigError where experts are shared out and a stage has none: DeepSpeed 0.19.8 adds up norms over stages for
    each group of parameters (zero/stage_1_and_2.py:2951), of which all must have as many.
    """
    if parallel.pp == 1:
        return [None]
    lm = without_memory(hf_config)
    if parallel.pp_layers:
        stages = [range(first, last) for first, last in pairwise(accumulate(parallel.pp_layers, initial=0))]
    else:
        stages = stage_layers(_layer_weights(lm, parallel.ep), parallel.pp)
    have_experts = {
        number
        for number, layer in enumerate(lm.base_model.layers)
        if any(_EXPERTS.match(name) for name, _ in layer.named_parameters())
    }
    for place, layers in enumerate(stages):
        if parallel.ep > 1 and not have_experts & set(layers):
            raise ConfigError(
                f"parallel.ep {parallel.ep}: stage {place} of parallel.pp {parallel.pp}, layers {layers[0]} to "
                f"{layers[-1]}, has no routed experts",
                hint=f"layers {min(have_experts)} to {max(have_experts)} have them; set parallel.pp_layers, or a "
                "smaller parallel.pp",
            )
    return [*stages]


def _layer_weights(lm: PreTrainedModel, expert_parts: int) -> list[int]:
    """Parameters a rank has of each layer, the embedding counted with the first and norm and head with the last; a tied
    head on both ends.
    """
    found = [_numel(layer, expert_parts) for layer in lm.base_model.layers]
    found[0] += _numel(lm.get_input_embeddings())
    found[-1] += _numel(lm.base_model.norm) + _numel(lm.get_output_embeddings())
    return found


@contextmanager
def only_layers(model_class: type[PreTrainedModel], layers: range | None) -> Iterator[None]:
    """While a model is built, layers outside `layers` are made without parameters; None builds all."""
    if layers is None:
        yield
        return

    def make(layer_class: type[nn.Module], config: PretrainedConfig, layer_idx: int) -> nn.Module:
        return layer_class(config, layer_idx) if layer_idx in layers else Absent(layer_idx)

    with replaced_layers(model_class, make):
        yield


def install_stage(lm: PreTrainedModel, stage: StageGroup, *, vocabulary: int) -> None:
    """Take embedding, norm and head of other stages out of a model built under `only_layers`; `vocabulary` is the whole
    model's.
    """
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    if not stage.is_first:
        dtype = embedding.weight.dtype
        embedding.__class__ = Received
        embedding.stage, embedding.dtype = stage, dtype
        if not (is_tied and stage.is_last):
            embedding.weight = None
    if not stage.is_last:
        lm.base_model.norm = HandedOn(stage)
        head.__class__ = Awaited
        head.stage, head.vocabulary = stage, vocabulary
        head.weight = head.bias = None


def is_copy_of_tied(lm: PreTrainedModel, stage: StageGroup) -> bool:
    """Whether this stage's embedding weight is the head's copy of the first stage's."""
    return stage.is_last and lm.get_input_embeddings().weight is not None


def _numel(module: nn.Module, expert_parts: int = 1) -> int:
    return sum(
        param.numel() // (expert_parts if _EXPERTS.match(name) else 1) for name, param in module.named_parameters()
    )
