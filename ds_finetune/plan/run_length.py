"""Checks settings against the length of a run, once its rows are counted."""

import math

from ds_finetune.config.profiling import ProfileConfig
from ds_finetune.config.schedule import Duration
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import EvalConfig, TrainConfig
from ds_finetune.errors import ConfigError


def check_run_length(config: RunConfig, *, steps: int, warmup: int, rows: int | None) -> list[str]:
    """ConfigError for a warm-up, a patience or a batch larger than the run; returns notes to print. `rows` is None for
    streamed data.
    """
    if warmup > steps:
        raise ConfigError(
            f"optim.warmup `{config.optim.warmup}` is {warmup} steps, and the run has {steps}: `optim.lr` would "
            "never be reached",
            hint=f"shorten optim.warmup to at most {steps} steps, or give a share such as `3%`",
        )
    _check_patience(config.eval, steps)
    _check_profile(config.profile, steps)
    return _batch_notes(config.train, config.data.packing, rows) if rows is not None else []


def _check_patience(evaluation: EvalConfig, steps: int) -> None:
    patience, every = evaluation.patience, evaluation.every
    if not patience or every is None:
        return
    evaluations = math.ceil(steps / Duration.parse(every).value)
    if patience + 1 >= evaluations:
        raise ConfigError(
            f"eval.patience {patience} cannot end a run of {steps} steps early: with eval.every `{every}` it has "
            f"{evaluations} evaluations, the first of which is the best so far",
            hint="lower eval.patience or eval.every, or leave eval.patience out",
        )


def check_profiled_ranks(profile: ProfileConfig | None, *, world_size: int) -> None:
    """ConfigError where `profile.ranks` names a rank that the run does not have."""
    ranks = profile.ranks if profile else "all"
    unknown = [str(rank) for rank in ranks if rank >= world_size] if ranks != "all" else []
    if unknown:
        raise ConfigError(
            f"profile.ranks names {', '.join(unknown)}, and the run has {world_size} ranks, from 0 to {world_size - 1}",
            hint="name ranks of the run, or `all`",
        )


def _check_profile(profile: ProfileConfig | None, steps: int) -> None:
    if profile is None:
        return
    last = profile.first_and_last[1]
    if last > steps:
        raise ConfigError(
            f"profile.steps `{profile.steps}` ends at step {last}, and the run has {steps} steps",
            hint=f"profile steps up to {steps}",
        )


def _batch_notes(train: TrainConfig, is_packed: bool, rows: int) -> list[str]:
    batch, kind = train.global_batch_size, "packed rows" if is_packed else "rows"
    if batch <= rows:
        return []
    text = f"train.global_batch_size {batch} is more than the {rows} {kind} of an epoch"
    if Duration.parse(train.duration).unit == "steps":
        return [f"{text}: each step sees rows more than once"]
    raise ConfigError(
        f"{text}: the epochs of `{train.duration}` would be joined in fewer steps",
        hint=f"set train.global_batch_size to at most {rows}, or give train.for in steps",
    )
