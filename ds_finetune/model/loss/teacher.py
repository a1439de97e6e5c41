"""The running teacher of a distillation: its weights and its next-token distributions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.attention.by_document import Documents
from ds_finetune.model.attention.kernels import packs_documents
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.skeleton import (
    Where,
    build_skeleton,
    full_fragment,
    resolve_folder,
    soft_cap,
)
from ds_finetune.model.loss.soft_targets import TeacherStates
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.weights.fp32_weights import Fp32Weights
from ds_finetune.model.weights.load import load_weights


@dataclass(frozen=True)
class TeacherPlan:
    """The plan of a teacher that runs beside the trained model, for distillation."""

    path: str
    hf_config: PretrainedConfig = field(repr=False)
    offload: str
    """Where the teacher's weights are held: `cpu` means host memory, `none` the device."""


def check_same_tokens(teacher: TeacherPlan, tokens: Mapping[str, int], model_tokens: Mapping[str, int]) -> None:
    """ModelError if teacher and model have different tokens or token ids, or the teacher's head lacks ids."""
    size = int(teacher.hf_config.vocab_size)
    if tokens == model_tokens and size <= max(tokens.values()):
        raise ModelError(
            f"the teacher {teacher.path} has a vocabulary of {size} tokens, but its tokenizer has ids up to "
            f"{max(tokens.values())}",
            hint="distil from a teacher that was trained with these tokens",
        )
    if tokens == model_tokens:
        return
    theirs, ours = ({number: token for token, number in part.items()} for part in (tokens, model_tokens))
    number = min(number for number in theirs.keys() | ours.keys() if theirs.get(number) != ours.get(number))
    raise ModelError(
        f"token id {number} is {theirs.get(number)!r} in the tokenizer of the teacher {teacher.path} ({len(theirs)} "
        f"tokens), but {ours.get(number)!r} in the model's tokenizer ({len(ours)} tokens)",
        hint="distil from a teacher with the model's own tokenizer and vocabulary",
    )


class HiddenStates(TrainedModel):
    """A causal language model whose forward returns hidden states instead of logits."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: tuple[Documents, ...] | None
    ) -> torch.Tensor:
        """Hidden states before the head, [batch, tokens, width]."""
        return self.hidden(input_ids, position_ids, documents)

    @property
    def head(self) -> nn.Linear:
        """Language-model head, which maps hidden states to logits."""
        head: nn.Linear = self.lm.get_output_embeddings()
        return head

    def unsharded_teacher(self) -> "Teacher":
        """A Teacher that runs this model, whose weights must not be sharded."""
        return Teacher(self, self.head, nullcontext, soft_cap(self.config))


def load_teacher(  # noqa: PLR0913 - where and how the model is built
    teacher: TeacherPlan,
    attention: str,
    precision: str,
    device: str,
    *,
    sp_group: SequenceParallelGroup | None = None,
    where: Where = full_fragment,
    init_context: AbstractContextManager[object] | None = None,
) -> HiddenStates:
    """Build a teacher and load its weights, in evaluation mode and without gradients."""
    dtype = PRECISION_DTYPES[precision]
    lm = build_skeleton(teacher.hf_config, attention=attention, dtype=dtype, device=device, init_context=init_context)
    in_fp32 = Fp32Weights(lm, where)
    load_weights(lm, resolve_folder(teacher.path), family=family_of(lm.config.model_type), where=in_fp32.where)
    in_fp32.install(lm)
    states = HiddenStates(lm.requires_grad_(requires_grad=False).eval(), sp_group)
    kind = torch.device(device).type
    states.packs_documents = packs_documents(attention, teacher.hf_config, device=kind, precision=precision)
    return states


@dataclass(frozen=True)
class Teacher:
    """A teacher model that is ready to run. It is no part of the trained module."""

    run: Callable[..., torch.Tensor]
    """Function that computes the teacher's hidden states: `HiddenStates`, or a DeepSpeed engine around it."""
    head: nn.Linear
    open_weights: Callable[[list[nn.Parameter]], AbstractContextManager[Any]]
    """Function that returns a context in which ZeRO-3 has gathered the given parameters of the teacher's head."""
    cap: float | None

    @torch.no_grad()
    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: tuple[Documents, ...] | None,
        supervised: torch.Tensor,
    ) -> torch.Tensor:
        """Compute hidden states at the indices `supervised` of the flattened rows, [supervised tokens, width]."""
        return self.run(input_ids, position_ids, documents).flatten(0, 1).index_select(0, supervised)

    @contextmanager
    def targets(self, hidden: torch.Tensor, temperature: float) -> Iterator[TeacherStates]:
        """Context that gathers the weights of the teacher's head, and yields its distributions for `hidden`."""
        bias: nn.Parameter | None = self.head.bias
        with self.open_weights(list(self.head.parameters())):
            weight, detached = self.head.weight.detach(), None if bias is None else bias.detach()
            yield TeacherStates(hidden, weight, detached, temperature, self.cap)
