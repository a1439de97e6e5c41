"""Which distillations may be run: those that tests compare with a plain PyTorch loop."""

from collections.abc import Iterator, Mapping
from typing import Any

from ds_finetune.config.objectives import DistillObjective, is_distillation
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import family_of
from ds_finetune.plan.mesh import Mesh


def check_distillation(config: RunConfig, mesh: Mesh) -> None:
    """ConfigError where `objective` asks for a distillation that contradicts itself or is not tested."""
    section = config.objective
    if not is_distillation(section):
        return
    for what, hint in (*_contradictions(config, section), *_untested(config, mesh, section)):
        raise ConfigError(f"objective distill with {what}", hint=hint)


def is_teacher_partitioned(zero_stage: int, offload: str) -> bool:
    """Whether a live teacher's weights are partitioned over all ranks; otherwise each rank holds them whole."""
    return zero_stage == 3 or offload != "none"


def check_teacher(mesh: Mesh, path: str, tree: Mapping[str, Any], *, max_seq_len: int) -> None:
    """ConfigError where the teacher with the config.json `tree` cannot read the rows of the run or their shards."""
    positions = tree.get("max_position_embeddings")
    if positions and max_seq_len > positions:
        raise ConfigError(
            f"train.max_seq_len {max_seq_len} is more than the {positions} positions of the teacher {path}",
            hint=f"set train.max_seq_len to {positions} or less",
        )
    kind, heads = str(tree.get("model_type")), int(tree.get("num_attention_heads") or 1)
    if mesh.sp > 1 and ("sp" not in family_of(kind).parallel_axes or heads % mesh.sp):
        raise ConfigError(
            f"parallel {mesh} with the teacher {path} of model_type {kind} and {heads} attention heads is not tested",
            hint="set parallel.sp to 1",
        )


def _contradictions(config: RunConfig, section: DistillObjective) -> Iterator[tuple[str, str]]:
    if section.scores is not None and section.temperature != 1:
        yield (
            f"scores and temperature {section.temperature:g}: how the probability of the tokens that are not stored "
            "changes with the temperature is not known",
            "set temperature to 1, or name a teacher",
        )
    if section.scores is not None and config.data.streaming:
        yield (
            "scores and data.streaming true: rows of a stream have no numbers by which scores are found",
            "set data.streaming to false, or name a teacher",
        )


def _untested(config: RunConfig, mesh: Mesh, section: DistillObjective) -> Iterator[tuple[str, str]]:
    if mesh.pp > 1 and section.teacher_offload != "none":
        # Only the ranks of the last stage run the teacher, and its weights would be on all ranks.
        yield (
            f"teacher_offload {section.teacher_offload} and parallel {mesh} is not tested",
            "set parallel.pp to 1, or teacher_offload to none",
        )
