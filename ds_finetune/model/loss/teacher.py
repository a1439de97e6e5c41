"""The teacher of a distillation: its weights, and its distributions of the next token."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.model.attention.by_document import Documents
from ds_finetune.model.build.skeleton import Where, build_skeleton, resolve_folder, whole
from ds_finetune.model.loss.soft_targets import TeacherStates
from ds_finetune.model.loss.teacher_plan import TeacherPlan
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.weights.load import load_weights


def load_teacher(  # noqa: PLR0913 - where and how the model is built
    teacher: TeacherPlan,
    *,
    attention: str,
    dtype: torch.dtype,
    device: str,
    where: Where = whole,
    init_context: AbstractContextManager[object] | None = None,
) -> PreTrainedModel:
    """The teacher in evaluation mode, without gradients; arguments as those of `build_skeleton` and `load_weights`."""
    lm = build_skeleton(teacher.hf_config, attention=attention, dtype=dtype, device=device, init_context=init_context)
    load_weights(lm, resolve_folder(teacher.path), family=family_of(lm.config.model_type), where=where)
    return lm.requires_grad_(requires_grad=False).eval()


class HiddenStates(TrainedModel):
    """A causal LM whose forward returns hidden states."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: tuple[Documents, ...] | None
    ) -> torch.Tensor:
        """Hidden states before the head, [batch, tokens, width]."""
        return self.hidden(input_ids, position_ids, documents)


@dataclass(frozen=True)
class Teacher:
    """A teacher that runs beside the model. It is no part of the module that is trained."""

    run: Callable[..., torch.Tensor]
    """`HiddenStates`, or the engine that runs it."""
    head: nn.Linear
    open_weights: Callable[[list[nn.Parameter]], AbstractContextManager[Any]]
    """Makes parameters whole while the context is open."""

    @torch.no_grad()
    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: tuple[Documents, ...] | None,
        supervised: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states of the `supervised` positions of the flattened rows, [supervised tokens, width]."""
        return self.run(input_ids, position_ids, documents).flatten(0, 1).index_select(0, supervised)

    @contextmanager
    def targets(self, hidden: torch.Tensor, temperature: float) -> Iterator[TeacherStates]:
        """The targets that follow from `hidden`, with the head's weights whole while the context is open."""
        bias: nn.Parameter | None = self.head.bias
        with self.open_weights(list(self.head.parameters())):
            yield TeacherStates(hidden, self.head.weight.detach(), None if bias is None else bias.detach(), temperature)
