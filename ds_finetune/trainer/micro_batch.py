"""Decides `train.activation_checkpointing: auto` by the estimate, and then `train.micro_batch_size: auto`: the largest
that fits by the estimate is tried on the longest rows, and halved while memory runs out. All ranks agree on the result,
which is remembered.
"""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from ds_finetune import __version__
from ds_finetune.checkpoint.run_state import versions
from ds_finetune.cluster.watchdog.monitor import Monitor
from ds_finetune.config.objectives import is_grpo
from ds_finetune.config.sections import TrainConfig
from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.engine.devices import exchange
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.plan.batch import AUTO
from ds_finetune.plan.estimate.memory import estimate_memory
from ds_finetune.plan.pipeline import forwards_together
from ds_finetune.plan.search.fitting import SPARE, bytes_of, chosen_recomputation, fits, legal_sizes, plan_with_rows
from ds_finetune.system.whole_file import replace_file
from ds_finetune.trainer.forecast import memory_table, what_fits
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.resolve import ResolvedRun, with_train
from ds_finetune.trainer.trial import DONE, OUT_OF_MEMORY, try_steps

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class TriedSize:
    """A micro-batch that was tried, the largest peak of a rank in its trial, and when that was."""

    rows: int
    peak_bytes: int
    when: str


def decide_recomputation(
    run: PreparedRun, store: dist.Store, monitor: Monitor
) -> tuple[PreparedRun, list[tuple[str, str]]]:
    """The run with what `train.activation_checkpointing: auto` is, and a line on it for its plan. `auto` is collective:
    ranks that recompute differently would wait for each other in exchanges. The smallest device of all ranks counts.
    """
    plan = run.plan
    if run.config.train.activation_checkpointing != AUTO:
        return run, [("recomputation", plan.activation_checkpointing)]
    budget = None
    if plan.device != "cpu":
        monitor.wait_until_prepared(store)
        own = json.dumps(run.memory.total_bytes if run.memory is not None else 0)
        sizes = exchange(store, plan.world, "memory of devices", own, timeout=_TIMEOUT)
        budget = min(map(int, sizes)) or None
    chosen, reason = chosen_recomputation(plan, run.model.described, run.traces, budget=budget)
    train = run.config.train.model_copy(update={"activation_checkpointing": chosen})
    config, plan = run.config.model_copy(update={"train": train}), replace(plan, activation_checkpointing=chosen)
    return replace(run, config=config, plan=plan), [("recomputation", f"{chosen} (auto: {reason})")]


def decide_micro_batch(run: PreparedRun, store: dist.Store, monitor: Monitor, say: Say) -> PreparedRun:
    """The run with a number of rows where its micro-batch is `auto`; collective, before there is a process group.

    `say` prints on rank zero what is tried. ConfigError on every rank where no micro-batch fits, or the memory of the
    model is not known; RunError where a trial fails for another reason than memory.
    """
    if run.config.train.micro_batch_size != AUTO:
        return run
    world = run.plan.world
    monitor.wait_until_prepared(store)
    if run.memory is None:
        raise ConfigError(
            f"train.micro_batch_size auto: {sys.platform} does not say how much memory is free", hint="give a number"
        )
    texts = exchange(store, world, "free memory", json.dumps(asdict(run.memory)), timeout=_TIMEOUT)
    budget = min(json.loads(text)["free_bytes"] for text in texts)
    estimates = {rows: bytes_of(run.plan, run.model.described, run.traces, rows) for rows in legal_sizes(run.plan)}
    file = _file(run, estimates, [json.loads(text)["total_bytes"] for text in texts])
    # Rank zero decides what is remembered: hosts may have other caches.
    remembered = exchange(
        store, world, "remembered micro-batch", _recall(file, budget) if world.rank == 0 else "", timeout=_TIMEOUT
    )[0]
    if remembered:
        tried = TriedSize(**json.loads(remembered))
        return _decided(run, tried.rows, f"remembered from {tried.when}, {_took(tried, budget)}")
    tried, refused = _try_sizes(run, estimates, budget, store, say if world.rank == 0 else say_nothing)
    if world.rank == 0:
        # A folder that cannot be written means another trial at the next start.
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(asdict(tried)) + "\n")
    return _decided(run, tried.rows, "; ".join([f"tried on the longest rows, {_took(tried, budget)}", *refused]))


def _try_sizes(
    run: PreparedRun, estimates: dict[int, int], budget: int, store: dist.Store, say: Say
) -> tuple[TriedSize, list[str]]:
    """The largest size whose trial leaves enough memory free, and why larger ones that were tried do not."""
    rows = max((size for size, need in estimates.items() if fits(need, budget)), default=0)
    refused: list[str] = []
    while rows:
        need, has = estimates[rows] / GIB, budget / GIB
        say(f"trying train.micro_batch_size {rows}: {need:.3f} of {has:.3f} GiB by the estimate")
        trial = try_steps({**run.tree, **_of_trial(run, rows)}, run.plan.world, store, topic=f"micro-batch {rows}")
        if trial.outcome == DONE and fits(trial.peak_bytes, budget):
            return TriedSize(rows, trial.peak_bytes, time.strftime("%Y-%m-%d %H:%M")), refused
        if trial.outcome not in (DONE, OUT_OF_MEMORY):
            raise RunError(
                f"the trial of train.micro_batch_size {rows} failed: {trial.error}",
                hint="give train.micro_batch_size a number, with which nothing is tried",
            )
        took = (
            f"took {trial.peak_bytes / GIB:.3f} GiB" if trial.outcome == DONE else f"ran out of memory ({trial.error})"
        )
        refused.append(f"{rows} {took}")
        say(f"train.micro_batch_size {refused[-1]}")
        rows = max((size for size in estimates if size <= rows // 2), default=0)
    raise _nothing_fits(run, budget, f"; tried: {'; '.join(refused)}" if refused else "")


def trial_section(run: ResolvedRun, rows: int) -> TrainConfig:
    """The section `train` of a trial: as many forwards as are ever held at once, and two where gradients add up."""
    plan, group = run.plan, forwards_together(run.plan.parallel)
    # With several chunks a rank holds those of two groups at most (`num_held_forwards`).
    most = plan.mesh.pp + 1 if group == 1 else 2 * group
    forwards = min(plan.batch.global_batch_size // (rows * plan.dp), most)
    size = {"micro_batch_size": rows, "global_batch_size": rows * plan.dp * forwards}
    return run.config.train.model_copy(update=size)


def _of_trial(run: ResolvedRun, rows: int) -> dict[str, Any]:
    """The sections of the run file that a trial has of its own. Its answers are those of one prompt."""
    train = trial_section(run, rows)
    found: dict[str, Any] = {"train": train.model_dump(mode="json", by_alias=True)}
    if is_grpo(run.config.objective):
        group = run.config.objective.model_copy(update={"group_size": train.global_batch_size})
        rollout = run.config.rollout.model_copy(update={"prompts_per_step": 1})
        found |= {"objective": group.model_dump(mode="json"), "rollout": rollout.model_dump(mode="json")}
    return found


def _decided(run: PreparedRun, rows: int, how: str) -> PreparedRun:
    """The run with forwards of `rows` rows, and a line of its plan that says how they were chosen."""
    run = with_train(run, run.config.train.model_copy(update={"micro_batch_size": rows}))
    plan = run.plan
    after = [name for name, _ in plan.decisions].index("batch") + 1
    line = ("micro batch", f"{rows} (auto: {how})")
    plan = replace(plan, decisions=(*plan.decisions[:after], line, *plan.decisions[after:]))
    return replace(run, plan=plan)


def _took(tried: TriedSize, budget: int) -> str:
    return f"{tried.peak_bytes / GIB:.3f} GiB at most of {budget / GIB:.3f} GiB that are free"


def _nothing_fits(run: PreparedRun, budget: int, tried: str) -> ConfigError:
    plan = plan_with_rows(run.plan, 1)
    estimate = estimate_memory(plan, run.model.described, run.traces)
    need, has = estimate.device_bytes / GIB, budget / GIB
    lines = [
        f"train.micro_batch_size auto: not even forwards of one row leave {SPARE:.0%} of the memory free; a rank needs "
        f"{need:.3f} GiB by the estimate and has {has:.3f} GiB{tried}:",
        *memory_table(estimate),
    ]
    return ConfigError("\n".join(lines), hint=what_fits(replace(run, plan=plan), budget=budget))


def _file(run: PreparedRun, estimates: dict[int, int], devices: list[int]) -> Path:
    """Where the size is remembered: by the rows, the ranks' devices, the versions, and the estimates, which depend on
    everything in a run file on which memory does.
    """
    plan, rows = run.plan, run.inputs.train.fingerprint()
    key = [
        __version__,
        versions(),
        rows,
        devices,
        str(plan.mesh),
        plan.zero,
        estimates,
    ]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True, default=str).encode())
    return Path(run.config.data.cache_dir, "micro-batch", f"{digest}.json")


def _recall(file: Path, budget: int) -> str:
    """What is remembered, as JSON; empty where nothing is that can be read and fits `budget`."""
    with suppress(OSError, ValueError, TypeError):
        tried = TriedSize(**json.loads(file.read_text(encoding="utf-8")))
        return json.dumps(asdict(tried)) if fits(tried.peak_bytes, budget) else ""
    return ""
