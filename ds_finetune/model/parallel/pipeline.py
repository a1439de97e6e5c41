"""Pipeline parallelism: each rank holds consecutive layers of a model and sends hidden states to the next (Huang et
al., GPipe, arXiv 1811.06965).

A stage is the whole Hugging Face model without the parameters of other stages, so its tensors keep their names. All
ranks of a pipeline read the same rows: positions, documents and labels are known on every stage, and only hidden
states are sent.
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
    """One way between neighbours of a pipeline, on which messages arrive in the order in which they are sent.

    Each has a process group of its own: NCCL ignores tags, and two ranks that each send before they receive would wait
    for each other within one group.
    """

    is_forward: bool
    """Whether it carries hidden states; otherwise their gradients."""
    wraps: bool
    """Whether it joins the last rank and the first one."""


class PipelineGroup(RankGroup):
    """Ranks that hold a model's layers, in order; rank i is stage i, with one or several chunks of layers."""

    num_chunks: int = 1
    running_chunk: int | None = None
    """The chunk that a forward runs; None where it runs all of this rank, and sends hidden states itself."""
    no_hidden_states: torch.Tensor
    """Hidden states [0, width] in the dtype and on the device of the model's."""
    links: Mapping[Link, dist.ProcessGroup] = MappingProxyType({})
    """The group of each way to the neighbours; empty with one chunk a rank."""
    embedding_group: dist.ProcessGroup | None = None
    """Ranks of the first and of the last stage that hold the same tensor parallel shard, with all their data and
    sequence parallel copies; None on other stages, and where only one end has the embedding.
    """
    adds_embedding: bool = True
    """Whether this rank, of those in `embedding_group` on its stage, has the sum of the embedding's gradients."""
    input_hidden_states: torch.Tensor | None = None
    """Hidden states that the previous stage sent for the latest forward; a leaf that requires a gradient where
    gradients are enabled. With several chunks a rank those for the running one, None for the first of the model.
    """

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.group_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.group_rank == self.size - 1

    @property
    def is_end(self) -> bool:
        """Whether this is the first or the last stage."""
        return self.is_first or self.is_last

    @property
    def runs_head(self) -> bool:
        """Whether a forward ends with the head on this rank."""
        return self.is_last and self.running_chunk in (None, self.num_chunks - 1)

    @property
    def next_rank(self) -> int:
        """The rank after this one; after the last one comes the first."""
        return (self.group_rank + 1) % self.size

    @property
    def previous_rank(self) -> int:
        """The rank before this one; before the first one comes the last."""
        return (self.group_rank - 1) % self.size

    def empty_hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Room for the hidden states [rows, tokens, width] of these tokens."""
        return self.no_hidden_states.new_empty(*input_ids.shape, self.no_hidden_states.shape[-1])

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send to stage `to`, which receives it."""
        dist.send(tensor.detach().contiguous(), group=self.group, group_dst=to)

    def receive(self, into: torch.Tensor, *, source: int) -> torch.Tensor:
        """Fill `into` with what stage `source` sends."""
        dist.recv(into, group=self.group, group_src=source)
        return into

    def broadcast_from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last stage's `tensor`, on every stage; elsewhere `tensor` is overwritten."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=self.size - 1)
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """The plain value of every stage, by stage."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce_embedding_grad(self, grad: torch.Tensor) -> None:
        """Replace the gradient of a weight that the first and the last stage hold so that its average over the ranks
        of a stage is the sum of both stages, averaged over the ranks that process other rows.

        One rank of each stage gets the whole sum and the others zeros: adding them is exact in every order. Otherwise
        the two copies would drift apart, as buckets and NCCL's algorithms decide the order on each stage.
        """
        assert self.embedding_group is not None, "only ends of a pipeline that share the embedding"
        dist.all_reduce(grad, group=self.embedding_group)
        if not self.adds_embedding:
            grad.zero_()

    def broadcast_embedding(self, weight: torch.Tensor) -> None:
        """Overwrite the last stage's copy of the embedding's `weight` with the first stage's."""
        assert self.embedding_group is not None, "only ends of a pipeline that share the embedding"
        dist.broadcast(weight.detach(), group=self.embedding_group, group_src=0)

    def close(self) -> None:
        """Drop the references to the process groups."""
        super().close()
        self.embedding_group = None
        self.links = {}


class MissingLayer(nn.Module):
    """Replaces a layer that another stage holds. With `has_choice` layers also return tokens chosen by an indexer; with
    several `streams` hidden states are [batch, tokens, streams, width] between layers.
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
        """Return the hidden states unchanged. The cache counts the tokens of its first layer, so it gets some here."""
        cache = take_cache(arguments)
        if cache is not None:
            # One number a token: with none it would count as empty (transformers 5.23, cache_utils.py, get_seq_length).
            token = hidden.flatten(2)[:, None, :, :1]
            cache.update(token, token, self.layer)
        if self.streams > 1:
            # As one wide stream where they have just arrived.
            hidden = hidden.reshape(*hidden.shape[:2], self.streams, -1)
        return (hidden, None) if self.has_choice else hidden


class ReceiveHiddenStates(nn.Embedding):
    """Replaces the embedding on later stages: receives hidden states from the previous stage.

    It keeps the weight where a tied head or multi-token prediction uses it.
    """

    pp_group: PipelineGroup

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] -> [batch, tokens, width]."""
        hidden = self.pp_group.receive(self.pp_group.empty_hidden(input_ids), source=self.pp_group.group_rank - 1)
        self.pp_group.input_hidden_states = hidden.requires_grad_(torch.is_grad_enabled())
        return self.pp_group.input_hidden_states

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings [batch, tokens, width] by the weight that this stage keeps."""
        return super().forward(input_ids)


class SendHiddenStates(nn.Module):
    """Replaces the last norm on earlier stages.

    It sends hidden states to the next stage where gradients are disabled; otherwise the schedule sends them.
    """

    def __init__(self, pp_group: PipelineGroup) -> None:
        super().__init__()
        self.pp_group = pp_group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states unchanged."""
        if not torch.is_grad_enabled():
            self.pp_group.send(hidden, to=self.pp_group.group_rank + 1)
        return hidden


class ReceiveLogits(nn.Linear):
    """Replaces the head on earlier stages: receives the logits of the last stage, so that all stages generate
    the same next token.
    """

    pp_group: PipelineGroup
    outputs: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> logits [..., outputs]."""
        return self.pp_group.broadcast_from_last(hidden.new_empty(*hidden.shape[:-1], self.outputs))


def build_meta_model(hf_config: PretrainedConfig, task: Task = "causal_lm") -> PreTrainedModel:
    """The whole model on the meta device, without memory for its tensors."""
    config = copy.deepcopy(hf_config)
    return build_skeleton(config, attention="eager", dtype=torch.bfloat16, device="meta", task=task)


def missing_layer(config: PretrainedConfig, layer: int) -> MissingLayer:
    """What replaces layer number `layer` of a model with this configuration."""
    indexer = family_of(config.model_type).indexer
    has_choice = indexer is not None and indexer.is_shared
    return MissingLayer(layer, has_choice=has_choice, streams=residual_streams(config))


def residual_streams(config: PretrainedConfig) -> int:
    """Number of hidden states of each token between layers: several with hyper-connections (DeepSeek-V4)."""
    return int(config.hc_mult) if family_of(config.model_type).compresses else 1


def _of_one_stream(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a model that takes the streams that arrive as one wide stream, not as embeddings, of which
    it would make equal streams. Its layers have their own.
    """
    changed = copy.copy(config)
    changed.hc_mult = 1
    return changed


@contextmanager
def build_only_layers(model_class: type[PreTrainedModel], layers: Container[int] | None) -> Iterator[None]:
    """A model built inside has a `MissingLayer` for each layer outside `layers`; None builds all."""
    if layers is None:
        yield
        return

    def make(layer_class: type[nn.Module], config: PretrainedConfig, layer_idx: int) -> nn.Module:
        return layer_class(config, layer_idx) if layer_idx in layers else missing_layer(config, layer_idx)

    with replaced_layers(model_class, make):
        yield


def install_pipeline_stage(lm: PreTrainedModel, pp_group: PipelineGroup, *, outputs: int) -> None:
    """Replace embedding, norm and head of other stages in a model built under `build_only_layers`, in place.

    `outputs` is the number of outputs of the whole model's head: tokens of its vocabulary, or scores.
    """
    embedding, head = lm.get_input_embeddings(), head_of(lm)
    is_tied = head.weight is embedding.weight
    streams, base = residual_streams(lm.config), lm.base_model
    # Neighbours send all streams of a token as one row.
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
    """Whether the head's weight is the embedding's; a score head has its own, whatever the config says."""
    return bool(lm.config.tie_word_embeddings) and not has_score_head(lm)


def has_embedding_copy(lm: PreTrainedModel, pp_group: PipelineGroup) -> bool:
    """Whether this stage's embedding weight is a copy of the first stage's, for a tied head or multi-token
    prediction.
    """
    return pp_group.is_last and lm.get_input_embeddings().weight is not None


class HandOver(MissingLayer):
    """Replaces a layer of another rank beside a chunk of this one, in forwards that run all chunks.

    Such forwards have no gradient. One micro-batch is under way, so a send waits only for a rank that is about to
    receive.
    """

    def __init__(self, missing: MissingLayer, pp_group: PipelineGroup) -> None:
        super().__init__(missing.layer, has_choice=missing.has_choice, streams=missing.streams)
        self.pp_group = pp_group
        self.sends = self.receives = False

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, None]:  # noqa: ANN401
        """Send `hidden` after the chunk before this layer, and return what arrives for the chunk after it."""
        assert not torch.is_grad_enabled(), "the schedule sends and receives where there are gradients"
        if self.sends:
            self.pp_group.send(hidden, to=self.pp_group.next_rank)
        if self.receives:
            hidden = self.pp_group.receive(torch.empty_like(hidden), source=self.pp_group.previous_rank)
        return super().forward(hidden, **arguments)


class ModelChunks:
    """The chunks of `lm` on a rank of `pp_group`, after `install_pipeline_stage`.

    Forwards outside `only` run all chunks in their order, and pass hidden states around the ranks.
    """

    def __init__(self, lm: PreTrainedModel, pp_group: PipelineGroup, chunks: Sequence[range]) -> None:
        self._base: Any = lm.base_model
        self._parts: list[dict[str, Any]] = [{"layers": self._layers(lm, chunk)} for chunk in chunks]
        if pp_group.is_last:
            for part in self._parts[:-1]:
                part["norm"] = nn.Identity()
        if residual_streams(lm.config) > 1:
            self._take_streams(lm, pp_group)
        embedding: Any = lm.get_input_embeddings()
        embedding.forward = partial(_arrived_or, pp_group, embedding.forward)
        for before, after in pairwise(chunks):
            self._hand_over(before.stop, pp_group).sends = True
            self._hand_over(after.start - 1, pp_group).receives = True

    @contextmanager
    def only(self, chunk: int) -> Iterator[None]:
        """While this is open, the model has only the layers of this chunk, and what comes after the last one.

        What activation checkpointing computes again calls layers themselves, so backward may run outside.
        """
        whole = {name: getattr(self._base, name) for name in self._parts[chunk]}
        for name, part in self._parts[chunk].items():
            setattr(self._base, name, part)
        try:
            yield
        finally:
            for name, part in whole.items():
                setattr(self._base, name, part)

    def _layers(self, lm: PreTrainedModel, chunk: range) -> nn.ModuleList:
        return nn.ModuleList(
            layer if number in chunk else missing_layer(lm.config, number)
            for number, layer in enumerate(self._base.layers)
        )

    def _take_streams(self, lm: PreTrainedModel, pp_group: PipelineGroup) -> None:
        """Let chunks after the model's first one begin, and those before its last one end, with streams as rows."""
        for number, part in enumerate(self._parts):
            if not pp_group.is_first or number:
                part["config"] = _of_one_stream(lm.config)
            if not pp_group.is_last or number < len(self._parts) - 1:
                part["hc_head"] = nn.Flatten(2)

    def _hand_over(self, layer: int, pp_group: PipelineGroup) -> HandOver:
        found = self._base.layers[layer]
        if not isinstance(found, HandOver):
            self._base.layers[layer] = found = HandOver(found, pp_group)
        return found


def _arrived_or(
    pp_group: PipelineGroup, embed: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor
) -> torch.Tensor:
    """The hidden states that arrived for the running chunk, or embeddings where none did."""
    arrived = pp_group.input_hidden_states
    return embed(input_ids) if pp_group.running_chunk is None or arrived is None else arrived
