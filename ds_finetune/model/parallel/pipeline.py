"""Pipeline parallelism (GPipe, arXiv 1811.06965): each rank has consecutive layers, and sends their output to the next.

A stage is the full Hugging Face model without the parameters of other stages, so tensors keep their names. All ranks of
a pipeline read the same rows, so positions, documents and labels need not be sent.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_attention import take_cache
from ds_finetune.foreign.transformers_models import replaced_layers
from ds_finetune.model.build.skeleton import Task, build_skeleton, has_score_head, head_of
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.rank_group import RankGroup

T = TypeVar("T")


class Link(NamedTuple):
    """One direction between neighbouring ranks of an interleaved pipeline. Messages arrive in the order of sending.

    Each link has its own process group, because NCCL ignores tags: in one group for both directions, two ranks that
    both send before they receive would hang.
    """

    is_forward: bool
    """Whether this link between pipeline ranks carries hidden states; otherwise it carries their gradients."""
    wraps: bool
    """Whether this link connects the last pipeline rank with the first one."""


class PipelineGroup(RankGroup):
    """The ranks of one pipeline, which hold a model's layers in order. Rank i is stage i, with one or more chunks."""

    num_chunks: int = 1
    running_chunk: int | None = None
    """Index of the chunk that a forward runs. If None, it runs all chunks and sends hidden states between them."""
    no_hidden_states: torch.Tensor
    """Empty tensor [0, width] with the width, dtype and device of the model's hidden states."""
    links: Mapping[Link, dist.ProcessGroup] = MappingProxyType({})
    """Process group of each link between neighbouring ranks; empty if each rank has one chunk."""
    embedding_group: dist.ProcessGroup | None = None
    """Ranks of the first and last stage that have this rank's tensor parallel shard of the embedding, for all data and
    sequence parallel coordinates. None on other stages, and if only one of these two stages has the embedding.
    """
    adds_embedding: bool = True
    """Whether this rank keeps the embedding's gradient, summed over stages; other ranks of its stage keep zeros."""
    input_hidden_states: torch.Tensor | None = None
    """Hidden states for this forward from the previous stage or, with several chunks per rank, from the previous chunk.
    In training they are a leaf that requires a gradient. None for the model's first chunk.
    """

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which embeds the tokens."""
        return self.group_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the head."""
        return self.group_rank == self.size - 1

    @property
    def is_end(self) -> bool:
        """Whether this stage is the first or the last of the pipeline."""
        return self.is_first or self.is_last

    @property
    def runs_head(self) -> bool:
        """Whether the forward ends with the head on this rank."""
        return self.is_last and self.running_chunk in (None, self.num_chunks - 1)

    @property
    def next_rank(self) -> int:
        """The rank after this one in the pipeline; after the last rank it is the first."""
        return (self.group_rank + 1) % self.size

    @property
    def previous_rank(self) -> int:
        """The rank before this one in the pipeline; before the first rank it is the last."""
        return (self.group_rank - 1) % self.size

    def empty_hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Uninitialised tensor [rows, tokens, width] to receive hidden states for the tokens `input_ids`."""
        return self.no_hidden_states.new_empty(*input_ids.shape, self.no_hidden_states.shape[-1])

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send a tensor to stage `to`, and wait until it is sent."""
        dist.send(tensor.detach().contiguous(), group=self.group, group_dst=to)

    def receive(self, into: torch.Tensor, *, source: int) -> torch.Tensor:
        """Receive a tensor from stage `source` in `into`, wait until it has arrived, and return it."""
        dist.recv(into, group=self.group, group_src=source)
        return into

    def broadcast_from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send the last stage's `tensor` to every stage, where it overwrites `tensor`."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=self.size - 1)
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """Gather the object `value` of all stages, in their order."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce_embedding_grad(self, grad: torch.Tensor) -> None:
        """All-reduce the gradient of an embedding weight that the first and last stage both have. After DeepSpeed's
        average over each stage's ranks it is the sum of both stages' gradients, averaged over ranks with other rows.

        On each stage one rank keeps the all-reduced sum. The others set it to zero, because adding zeros is exact in
        every order. Otherwise the copies of the weight would drift apart, because buckets and NCCL's algorithms
        decide the order of additions on each stage.
        """
        assert self.embedding_group is not None, "only ends of a pipeline that share the embedding"
        dist.all_reduce(grad, group=self.embedding_group)
        if not self.adds_embedding:
            grad.zero_()

    def broadcast_embedding(self, weight: torch.Tensor) -> None:
        """Overwrite the last stage's copy of the embedding `weight` with the first stage's."""
        assert self.embedding_group is not None, "only ends of a pipeline that share the embedding"
        dist.broadcast(weight.detach(), group=self.embedding_group, group_src=0)

    def close(self) -> None:
        """Drop the references to process groups, so that they can be destroyed."""
        super().close()
        self.embedding_group = None
        self.links = {}


class MissingLayer(nn.Module):
    """Placeholder for a layer of another pipeline stage. With `has_choice` it returns a tuple, like layers that pass
    on an indexer's chosen tokens. With several residual `streams`, hidden states are [batch, tokens, streams, width].
    """

    def __init__(self, layer: int, *, has_choice: bool = False, streams: int = 1) -> None:
        super().__init__()
        self.layer, self.has_choice, self.streams = layer, has_choice, streams

    def forward(
        self,
        hidden: torch.Tensor,
        *_: Any,  # noqa: ANN401 - what layers take
        **arguments: Any,  # noqa: ANN401
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Return the hidden states unchanged. A KV cache gets one number per token, so that its length is right."""
        cache = take_cache(arguments)
        if cache is not None:
            # transformers measures a cache's length by this tensor, so it must not be empty (5.23, cache_utils.py,
            # get_seq_length).
            token = hidden.flatten(2)[:, None, :, :1]
            cache.update(token, token, self.layer)
        if self.streams > 1:
            # A token's residual streams are sent to the next pipeline stage as one vector.
            hidden = hidden.reshape(*hidden.shape[:2], self.streams, -1)
        return (hidden, None) if self.has_choice else hidden


class ReceiveHiddenStates(nn.Embedding):
    """Replaces the embedding on later pipeline stages, and receives hidden states from the previous stage.

    It keeps the embedding's weight if the stage needs it for a tied head or multi-token prediction.
    """

    pp_group: PipelineGroup

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Receive the previous stage's hidden states [batch, tokens, width] for the token ids [batch, tokens]."""
        hidden = self.pp_group.receive(self.pp_group.empty_hidden(input_ids), source=self.pp_group.group_rank - 1)
        self.pp_group.input_hidden_states = hidden.requires_grad_(torch.is_grad_enabled())
        return self.pp_group.input_hidden_states

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens as [batch, tokens, width], with this stage's copy of the embedding weight."""
        return super().forward(input_ids)


class SendHiddenStates(nn.Module):
    """Replaces the final norm on earlier pipeline stages.

    Without gradients it sends hidden states to the next stage. In training the pipeline schedule sends them.
    """

    def __init__(self, pp_group: PipelineGroup) -> None:
        super().__init__()
        self.pp_group = pp_group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Send hidden states to the next stage if gradients are off, and return them unchanged."""
        if not torch.is_grad_enabled():
            self.pp_group.send(hidden, to=self.pp_group.group_rank + 1)
        return hidden


class ReceiveLogits(nn.Linear):
    """Replaces the head on earlier stages, and receives the last one's logits: all stages generate the same token."""

    pp_group: PipelineGroup
    outputs: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Receive the last stage's logits [..., outputs] for hidden states [..., width]."""
        return self.pp_group.broadcast_from_last(hidden.new_empty(*hidden.shape[:-1], self.outputs))


def build_meta_model(hf_config: PretrainedConfig, task: Task = "causal_lm") -> PreTrainedModel:
    """The unsharded model on the meta device, where it needs no memory."""
    config = copy.deepcopy(hf_config)
    return build_skeleton(config, attention="eager", dtype=torch.bfloat16, device="meta", task=task)


def missing_layer(config: PretrainedConfig, layer: int) -> MissingLayer:
    """Placeholder for layer number `layer` of a model with this configuration."""
    indexer = family_of(config.model_type).indexer
    has_choice = indexer is not None and indexer.is_shared
    return MissingLayer(layer, has_choice=has_choice, streams=residual_streams(config))


def residual_streams(config: PretrainedConfig) -> int:
    """Number of residual streams, each of which has a hidden state per token: several in DeepSeek-V4, else 1."""
    return int(config.hc_mult) if family_of(config.model_type).compresses else 1


def _of_one_stream(config: PretrainedConfig) -> PretrainedConfig:
    """Configuration for the model of a later pipeline stage. It must not expand its input into equal residual streams,
    because it receives all streams as one wide vector. The configuration of layers is unchanged.
    """
    changed = copy.copy(config)
    changed.hc_mult = 1
    return changed


@contextmanager
def build_only_layers(model_class: type[PreTrainedModel], layers: Container[int] | None) -> Iterator[None]:
    """Context in which a model is built with a `MissingLayer` in place of each layer outside `layers`."""
    if layers is None:
        yield
        return

    def make(layer_class: type[nn.Module], config: PretrainedConfig, layer_idx: int) -> nn.Module:
        return layer_class(config, layer_idx) if layer_idx in layers else missing_layer(config, layer_idx)

    with replaced_layers(model_class, make):
        yield


def install_pipeline_stage(lm: PreTrainedModel, pp_group: PipelineGroup, *, outputs: int) -> None:
    """Replace the embedding, norm and head that belong to other stages, in place, by modules that communicate with
    these stages. `lm` was built under `build_only_layers`.

    `outputs` is the number of outputs of the unsharded head: vocabulary size or number of scores.
    """
    embedding, head = lm.get_input_embeddings(), head_of(lm)
    is_tied = head.weight is embedding.weight
    streams, base = residual_streams(lm.config), lm.base_model
    pp_group.no_hidden_states = embedding.weight.new_empty(0, streams * embedding.embedding_dim)
    if not pp_group.is_first:
        base.config = _of_one_stream(lm.config) if streams > 1 else base.config
        embedding.__class__ = ReceiveHiddenStates
        embedding.pp_group = pp_group
        if not (pp_group.is_last and (is_tied or mtp_layers(lm.config))):
            embedding.weight = None
    if not pp_group.is_last:
        base.norm = SendHiddenStates(pp_group)
        if streams > 1:
            base.hc_head = nn.Flatten(2)
        head.__class__ = ReceiveLogits
        head.pp_group, head.outputs = pp_group, outputs
        head.weight = head.bias = None


def has_tied_head(lm: PreTrainedModel) -> bool:
    """Whether the head's weight is the embedding's. A head for scores always has its own weight."""
    return bool(lm.config.tie_word_embeddings) and not has_score_head(lm)


def has_embedding_copy(lm: PreTrainedModel, pp_group: PipelineGroup) -> bool:
    """Whether this stage has a copy of the first stage's embedding, for a tied head or multi-token prediction."""
    return pp_group.is_last and lm.get_input_embeddings().weight is not None


class HandOver(MissingLayer):
    """Placeholder for a neighbouring rank's layer. It sends or receives hidden states in forwards of all own chunks.

    Such forwards have no gradient and run one micro-batch at a time, so a blocking send only waits for a rank that is
    about to receive.
    """

    def __init__(self, missing: MissingLayer, pp_group: PipelineGroup) -> None:
        super().__init__(missing.layer, has_choice=missing.has_choice, streams=missing.streams)
        self.pp_group = pp_group
        self.sends = self.receives = False

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, None]:  # noqa: ANN401
        """Send `hidden` if a chunk of this rank ends before this layer. Receive it if one begins after this layer."""
        assert not torch.is_grad_enabled(), "the schedule sends and receives where there are gradients"
        if self.sends:
            self.pp_group.send(hidden, to=self.pp_group.next_rank)
        if self.receives:
            hidden = self.pp_group.receive(torch.empty_like(hidden), source=self.pp_group.previous_rank)
        return super().forward(hidden, **arguments)


class ModelChunks:
    """This rank's chunks of layers in an interleaved pipeline, installed in `lm` after `install_pipeline_stage`.

    A forward runs all chunks in order and sends hidden states between them, except in the context `only`.
    """

    def __init__(self, lm: PreTrainedModel, pp_group: PipelineGroup, chunks: Sequence[range]) -> None:
        self._base: Any = lm.base_model
        self._parts: list[dict[str, Any]] = [{} for _ in chunks]
        has_streams = residual_streams(lm.config) > 1
        for number, (chunk, part) in enumerate(zip(chunks, self._parts, strict=True)):
            part["layers"] = nn.ModuleList(
                layer if index in chunk else missing_layer(lm.config, index)
                for index, layer in enumerate(self._base.layers)
            )
            is_last = number == len(self._parts) - 1
            if pp_group.is_last and not is_last:
                part["norm"] = nn.Identity()
            if has_streams and (number or not pp_group.is_first):
                part["config"] = _of_one_stream(lm.config)
            if has_streams and not (pp_group.is_last and is_last):
                part["hc_head"] = nn.Flatten(2)
        embedding: Any = lm.get_input_embeddings()
        embedding.forward = partial(_arrived_or, pp_group, embedding.forward)
        for before, after in pairwise(chunks):
            self._hand_over(before.stop, pp_group).sends = True
            self._hand_over(after.start - 1, pp_group).receives = True

    @contextmanager
    def only(self, chunk: int) -> Iterator[None]:
        """Context in which the model has only the layers of one chunk; the last chunk also has final norm and head.

        Activation checkpointing recomputes layers directly, so backward may run outside of the context.
        """
        attributes = {name: getattr(self._base, name) for name in self._parts[chunk]}
        for name, part in self._parts[chunk].items():
            setattr(self._base, name, part)
        try:
            yield
        finally:
            for name, part in attributes.items():
                setattr(self._base, name, part)

    def _hand_over(self, layer: int, pp_group: PipelineGroup) -> HandOver:
        module = self._base.layers[layer]
        if not isinstance(module, HandOver):
            self._base.layers[layer] = module = HandOver(module, pp_group)
        return module


def _arrived_or(
    pp_group: PipelineGroup, embed: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor
) -> torch.Tensor:
    arrived = pp_group.input_hidden_states
    return embed(input_ids) if pp_group.running_chunk is None or arrived is None else arrived
