"""The changes of a run file with which a run that does not fit into memory would fit, by the estimate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import FinetuneError
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.deepspeed_config import read_choices
from ds_finetune.plan.estimate.memory import estimate_memory
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.micro_batch import fits, largest_micro_batch

_HIGHEST_STAGE = 3


@dataclass(frozen=True)
class FittingChange:
    """Values of the run file, as `KEY VALUE` joined by commas, and the bytes on the device that a run has with them."""

    text: str
    device_bytes: int


@dataclass(frozen=True)
class _Change:
    text: str
    config: RunConfig
    plan: Plan
    device_bytes: int


def fitting_changes(config: RunConfig, plan: Plan, model: ModelConfig, *, budget: int) -> tuple[FittingChange, ...]:
    """The single changes with which the run leaves enough of `budget` bytes free; where there is none, the shortest
    sequence of changes in the order of `_changes` that does; empty where nothing does.

    A run with a change is one that `make_plan` accepts; none of them changes the loss.
    """
    single = [change for change in _changes(config, plan, model, budget) if fits(change.device_bytes, budget)]
    if single:
        return tuple(FittingChange(change.text, change.device_bytes) for change in single)
    texts: list[str] = []
    while (change := _most_helpful(config, plan, model, budget)) is not None:
        texts.append(change.text)
        config, plan = change.config, change.plan
        if fits(change.device_bytes, budget):
            return (FittingChange(", ".join(texts), change.device_bytes),)
    return ()


def _most_helpful(config: RunConfig, plan: Plan, model: ModelConfig, budget: int) -> _Change | None:
    """The change after which least is needed; None where no change lowers it."""
    now = estimate_memory(plan, model).device_bytes
    found = [change for change in _changes(config, plan, model, budget) if change.device_bytes < now]
    return min(found, key=lambda change: change.device_bytes, default=None)


def _changes(config: RunConfig, plan: Plan, model: ModelConfig, budget: int) -> Iterator[_Change]:
    """Each change that a run could make on its own, what costs least time first."""
    for text, train, zero in _candidates(config, plan, model, budget):
        changed = _changed(config, plan, train, zero)
        try:
            planned = make_plan(changed, world=plan.world, device=plan.device)
            yield _Change(text, changed, planned, estimate_memory(planned, model).device_bytes)
        except FinetuneError:
            # The combination is refused, so it would not help.
            continue


def _candidates(
    config: RunConfig, plan: Plan, model: ModelConfig, budget: int
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Text of a change, keys of the section `train`, and keys of DeepSpeed's `zero_optimization`."""
    train = config.train
    rows = largest_micro_batch(plan, model, budget=budget) or 1
    if rows < plan.batch.micro_batch_size:
        yield f"train.micro_batch_size {rows}", {"micro_batch_size": rows}, {}
    for stage in range(plan.zero_stage + 1, _HIGHEST_STAGE + 1 if plan.world.world_size > 1 else 0):
        yield f"zero_optimization.stage {stage}", {}, {"stage": stage}
    if not train.activation_checkpointing:
        yield "train.activation_checkpointing true", {"activation_checkpointing": True}, {}
    if not train.tiled_mlp:
        yield "train.tiled_mlp true", {"tiled_mlp": True}, {}
    if plan.device == "cpu":
        return
    if not train.activation_offload:
        on = {"activation_offload": True, "activation_checkpointing": True}
        yield "train.activation_offload true", on, {}
    if plan.offload_optimizer == "none":
        yield "offload_optimizer.device cpu", {}, {"offload_optimizer": {"device": "cpu"}}
    if plan.offload_param == "none" and plan.zero_stage == _HIGHEST_STAGE:
        yield "offload_param.device cpu", {}, {"offload_param": {"device": "cpu"}}


def _changed(config: RunConfig, plan: Plan, train: Mapping[str, Any], zero: Mapping[str, Any]) -> RunConfig:
    given = {"micro_batch_size": plan.batch.micro_batch_size, **train}
    updates: dict[str, Any] = {"train": config.train.model_copy(update=given)}
    if zero:
        tree = read_choices(config.deepspeed)[0] if config.deepspeed else {}
        section = {**(tree.get("zero_optimization") or {"stage": plan.zero_stage}), **zero}
        updates["deepspeed"] = {**tree, "zero_optimization": section}
    return config.model_copy(update=updates)


def first_texts(changes: Sequence[FittingChange], most: int) -> str:
    """The first `most` changes for people, each with its GiB."""
    return "; ".join(f"{change.text} ({change.device_bytes / 2**30:,.2f} GiB)" for change in changes[:most])
