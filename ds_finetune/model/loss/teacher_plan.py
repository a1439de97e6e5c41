"""The live teacher of a distillation: which model it is, whether its vocabulary fits, and what a rank holds of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig

from ds_finetune.config.objectives import ObjectiveConfig, is_distillation
from ds_finetune.errors import ModelError
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, build_skeleton, read_hf_config


@dataclass(frozen=True)
class TeacherPlan:
    """A model that runs beside the one that is trained."""

    path: str
    """Folder or hub id."""
    hf_config: PretrainedConfig = field(repr=False)
    offload: str
    """`cpu` where its weights are held in host memory, else `none`."""

    def count_params(self) -> int:
        """Parameters of the whole model, which is built without memory."""
        lm = build_skeleton(self.hf_config, attention="eager", dtype=torch.bfloat16, device="meta")
        return sum(math.prod(param.shape) for param in lm.parameters())


def plan_teacher(objective: ObjectiveConfig, hf_config: PretrainedConfig) -> TeacherPlan | None:
    """The teacher that `objective` names, None where it names none; ModelError where its vocabulary has another size
    than that of the model with `hf_config`.
    """
    if not is_distillation(objective) or objective.teacher is None:
        return None
    teacher = read_hf_config(objective.teacher, files=TOKENIZER_PATTERNS)
    check_vocabulary_sizes(objective.teacher, int(teacher.vocab_size), int(hf_config.vocab_size))
    return TeacherPlan(objective.teacher, teacher, objective.teacher_offload)


def check_vocabulary_sizes(teacher: str, size: int, model_size: int) -> None:
    """ModelError where teacher and model have vocabularies of different sizes."""
    if size != model_size:
        raise ModelError(
            f"the teacher {teacher} has a vocabulary of {size} tokens, and the model one of {model_size}",
            hint="distil from a teacher with the model's own tokenizer and vocabulary",
        )


def check_same_tokens(teacher: str, tokens: Mapping[str, int], model_tokens: Mapping[str, int]) -> None:
    """ModelError where the same id is not the same token in the vocabularies (id by token) of teacher and model."""
    if tokens == model_tokens:
        return
    theirs, ours = ({number: token for token, number in part.items()} for part in (tokens, model_tokens))
    number = min(number for number in theirs.keys() | ours.keys() if theirs.get(number) != ours.get(number))
    raise ModelError(
        f"id {number} is {theirs.get(number)!r} in the tokenizer of the teacher {teacher}, which has {len(theirs)} "
        f"tokens, and {ours.get(number)!r} in that of the model, which has {len(ours)}",
        hint="distil from a teacher with the model's own tokenizer and vocabulary",
    )
