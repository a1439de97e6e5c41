"""Memory of a teacher that runs beside the model of a distillation: its weights, its forward, and what the loss reads
of it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from ds_finetune.config.objectives import is_distillation
from ds_finetune.config.parallel import ParallelConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.families.tensors import EMBEDDING, HEAD
from ds_finetune.plan.combinations import WEIGHT_BYTES
from ds_finetune.plan.distillation import is_teacher_partitioned
from ds_finetune.plan.estimate.activation_rows import model_activations, tokens_of_rank
from ds_finetune.plan.estimate.gathered_weights import DEFAULT_RULES, arriving_copies, gathered_weights, num_persistent
from ds_finetune.plan.estimate.rank_weights import RankWeights, rank_weights
from ds_finetune.plan.estimate.rows import FORWARD, MemoryRow, Place
from ds_finetune.plan.plan import Plan

_OFFLOAD, _LENGTH = "objective.teacher_offload", "train.max_seq_len"


def teacher_rows(plan: Plan, given: ModelConfig | None) -> Iterator[MemoryRow]:
    """Rows for the teacher of a run on a rank that has the head; none where it has no teacher. Its config.json is read
    from its folder unless it is `given`. ModelError and ConfigError, which name the teacher, where it is not there or
    where the arithmetic of its model type is not known.
    """
    section = plan.objective
    if not is_distillation(section) or section.teacher is None:
        return
    teacher = given if given is not None else _read_config(section.teacher)
    is_cut = is_teacher_partitioned(plan.zero_stage, section.teacher_offload)
    try:
        (weights,) = rank_weights(teacher, ParallelConfig(), zero_ranks=plan.world.world_size if is_cut else 1)
    except ConfigError as unknown:
        raise ConfigError(f"the teacher {section.teacher}: {unknown.message}", hint=unknown.hint) from None
    home: Place = "host" if plan.device == "cpu" else "gpu"
    place: Place = "host" if section.teacher_offload != "none" else home
    width = WEIGHT_BYTES[plan.precision]
    held = sum(kind.sharded for kind in weights.kinds)
    yield MemoryRow("weights of the teacher", place, width * held, _OFFLOAD)
    if is_cut:
        yield from _gathered_rows(weights, home, width)
    yield from _activation_rows(plan, teacher, home)


def _activation_rows(plan: Plan, teacher: ModelConfig, home: Place) -> Iterator[MemoryRow]:
    """The forward of one layer at a time, and hidden states until the head of the model has read them."""
    activations, tokens = model_activations(plan, teacher), tokens_of_rank(plan)
    working = max(layer.forward for layer in activations.kinds) + activations.layer_input
    yield MemoryRow("one layer of the teacher", home, working * tokens, _LENGTH, ("teacher",))
    yield MemoryRow("hidden states of the teacher", home, activations.layer_input * tokens, _LENGTH, FORWARD)


def _gathered_rows(weights: RankWeights, home: Place, width: int) -> Iterator[MemoryRow]:
    """Weights of a partitioned teacher that are whole on a rank, by DeepSpeed's default rules (engine/teacher.py)."""
    kinds = [kind for kind in weights.kinds if kind.name != HEAD]
    yield MemoryRow("small weights of the teacher, whole", home, width * num_persistent(kinds, DEFAULT_RULES))
    forward, *_ = gathered_weights(kinds, DEFAULT_RULES, passes=1, copies=arriving_copies(home))
    yield MemoryRow("gathered weights of the teacher", home, width * forward.numel, "", ("teacher",))
    yield MemoryRow("weights of the teacher that arrive", home, width * forward.arriving, "", ("teacher",))
    sizes = {kind.name: kind.numel for kind in weights.kinds}
    head = sizes.get(HEAD, sizes[EMBEDDING])
    yield MemoryRow("head of the teacher, whole", home, width * head, "", ("head",))


def _read_config(folder: str) -> ModelConfig:
    try:
        tree: ModelConfig = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(
            f"the teacher {folder} has no config.json here", hint="name a folder with the teacher's config.json"
        ) from None
    return tree
