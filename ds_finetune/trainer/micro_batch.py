"""Decides `train.micro_batch_size: auto`: the largest that fits by the estimate and in a trial, on which all ranks
agree, and which is remembered.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
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
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.data.stream import StreamedRows
from ds_finetune.engine.device_memory import DeviceMemory
from ds_finetune.engine.devices import exchange
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.plan.batch import AUTO, with_micro_batch
from ds_finetune.plan.estimate.memory import estimate_memory
from ds_finetune.plan.pipeline import forwards_together
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.micro_batch import SPARE, bytes_of, fits, largest_micro_batch, legal_sizes, plan_with_rows
from ds_finetune.system.whole_file import replace_file
from ds_finetune.trainer.distillation import with_local_teacher
from ds_finetune.trainer.memory_report import memory_table, what_fits
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.resolve import ResolvedRun, complete_plan
from ds_finetune.trainer.trial import try_steps
from ds_finetune.trainer.trial_rows import sizes_digest
from ds_finetune.world import accelerate_choices

_FOLDER = "micro-batch"
"""Below `data.cache_dir`."""
_TIMEOUT = timedelta(minutes=30)
_WITHOUT_EFFECT: Mapping[str, Collection[str]] = {
    "model": {"path", "tokenizer"},
    "train": {"for", "seed", "micro_batch_size", "max_skipped_steps", "max_grad_norm"},
    "objective": {"teacher"},
    "optim": {"lr", "weight_decay", "betas", "eps", "lr_scheduler", "warmup", "min_lr_ratio"},
    "parallel": (),
    "lora": (),
    "mtp": {"weight"},
    "router": {"bias_update"},
    "indexer": {"weight"},
    "inexact": (),
}
"""The sections of a run file on which its memory depends, each with its keys on which it does not."""
_DERIVED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class TriedSize:
    """A micro-batch that was tried, the largest peak of a rank in its trial, and when and where that was."""

    rows: int
    largest_rows: int
    """The most rows that fitted then by the estimate."""
    peak_bytes: int
    when: str
    host: str

    def still_holds(self, *, largest_rows: int, budget: int) -> bool:
        """Whether it fits `budget` bytes and no larger size is worth a trial, where `largest_rows` fit now."""
        return fits(self.peak_bytes, budget) and largest_rows <= self.largest_rows


@dataclass(frozen=True)
class _UndecidedRun:
    """What ranks decide from: the undecided run, their devices by rank, and the least that one of them has free."""

    run: PreparedRun
    devices: Sequence[DeviceMemory]

    @property
    def budget(self) -> int:
        return min(device.free_bytes for device in self.devices)

    @property
    def largest_rows(self) -> int:
        """The most rows that fit by the estimate; 0 where not even one does."""
        run = self.run
        config = with_local_teacher(run.config, run.inputs.model)
        return largest_micro_batch(config, run.plan, run.inputs.config_tree, budget=self.budget)


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
    undecided = _UndecidedRun(run, [DeviceMemory(**json.loads(text)) for text in texts])
    key = _key(undecided)
    # Rank zero decides what is remembered: hosts may have other caches.
    memory = _recall(_place(run, key), key) if world.rank == 0 else ""
    remembered = exchange(store, world, "remembered micro-batch", memory, timeout=_TIMEOUT)[0]
    choice = TriedSize(**json.loads(remembered)) if remembered else None
    if choice is not None and choice.still_holds(largest_rows=undecided.largest_rows, budget=undecided.budget):
        return _decided(run, choice.rows, f"remembered from {choice.when} on {choice.host}, {_took(choice, undecided)}")
    say = say if world.rank == 0 else say_nothing
    if choice is not None:
        say(
            f"train.micro_batch_size {choice.rows} of {choice.when} is not taken: {_took(choice, undecided)}; by the "
            f"estimate {choice.largest_rows} rows fitted then, and {undecided.largest_rows} fit now"
        )
    choice, refused = _try_sizes(undecided, store, say)
    if world.rank == 0:
        _remember(_place(run, key), key, choice)
    return _decided(run, choice.rows, "; ".join([f"tried on the longest rows, {_took(choice, undecided)}", *refused]))


def _try_sizes(undecided: _UndecidedRun, store: dist.Store, say: Say) -> tuple[TriedSize, list[str]]:
    """The largest size whose trial leaves enough memory free, and why larger ones that were tried do not."""
    run = undecided.run
    largest = undecided.largest_rows
    if not largest:
        raise _nothing_fits(undecided, "")
    refused: list[str] = []
    for rows in reversed([size for size in legal_sizes(run.config, run.plan) if size <= largest]):
        config = with_local_teacher(run.config, run.inputs.model)
        estimate = bytes_of(config, run.plan, run.inputs.config_tree, rows)
        say(
            f"trying train.micro_batch_size {rows}: {estimate / GIB:.3f} of {undecided.budget / GIB:.3f} GiB by the "
            "estimate"
        )
        trial = try_steps(trial_config(run.config, run.plan, rows), run.plan.world, store, topic=f"micro-batch {rows}")
        if trial.is_done and fits(trial.peak_bytes, undecided.budget):
            when = time.strftime("%Y-%m-%d %H:%M")
            return TriedSize(rows, largest, trial.peak_bytes, when, socket.gethostname()), refused
        if not trial.is_done and not trial.is_out_of_memory:
            raise RunError(
                f"the trial of train.micro_batch_size {rows} failed: {trial.error}",
                hint="give train.micro_batch_size a number, with which nothing is tried",
            )
        took = f"took {trial.peak_bytes / GIB:.3f} GiB" if trial.is_done else f"ran out of memory ({trial.error})"
        refused.append(f"{rows} {took}")
        say(f"train.micro_batch_size {refused[-1]}")
    raise _nothing_fits(undecided, f"; tried: {'; '.join(refused)}")


def trial_config(config: RunConfig, plan: Plan, rows: int) -> RunConfig:
    """The run file of a trial: as many forwards as are ever held at once, and two where gradients add up."""
    group = forwards_together(config.parallel)
    # With several chunks a rank holds those of two groups at most (`num_held_forwards`).
    most = plan.mesh.pp + 1 if group == 1 else 2 * group
    forwards = min(plan.batch.global_batch_size // (rows * plan.dp), most)
    config = with_micro_batch(config, rows)
    train = config.train.model_copy(update={"global_batch_size": rows * plan.dp * forwards})
    return config.model_copy(update={"train": train})


def _decided(run: PreparedRun, rows: int, how: str) -> PreparedRun:
    """The run with forwards of `rows` rows, and a line of its plan that says how they were chosen."""
    config, old = with_micro_batch(run.config, rows), run.plan
    plan = make_plan(config, world=old.world, device=old.device, accelerate=accelerate_choices(os.environ))
    resolved = complete_plan(ResolvedRun(config, plan, run.inputs.model, run.notes))
    plan = _with_line(resolved.plan, f"{rows} (auto: {how})")
    return replace(run, config=config, plan=plan, estimate=resolved.estimate)


def _with_line(plan: Plan, text: str) -> Plan:
    after = [name for name, _ in plan.decisions].index("batch") + 1
    return replace(plan, decisions=(*plan.decisions[:after], ("micro batch", text), *plan.decisions[after:]))


def _took(choice: TriedSize, undecided: _UndecidedRun) -> str:
    return f"{choice.peak_bytes / GIB:.3f} GiB at most of {undecided.budget / GIB:.3f} GiB that are free"


def _nothing_fits(undecided: _UndecidedRun, tried: str) -> ConfigError:
    run = undecided.run
    plan = plan_with_rows(run.config, run.plan, 1)
    config = with_local_teacher(with_micro_batch(run.config, 1), run.inputs.model)
    estimate = estimate_memory(config, plan, run.inputs.config_tree)
    need, has = estimate.device_bytes / GIB, undecided.budget / GIB
    lines = [
        f"train.micro_batch_size auto: not even forwards of one row leave {SPARE:.0%} of the memory free; a rank needs "
        f"{need:.3f} GiB by the estimate and has {has:.3f} GiB{tried}:",
        *memory_table(estimate),
    ]
    return ConfigError("\n".join(lines), hint=what_fits(replace(run, plan=plan), budget=undecided.budget))


def _key(undecided: _UndecidedRun) -> dict[str, Any]:
    """Everything on which the largest micro-batch depends, as plain values; the seed, the learning rate or the names of
    files do not count.
    """
    run, plan = undecided.run, undecided.run.plan
    tree = run.config.model_dump(mode="json", by_alias=True)
    sections = {name: _without(tree.get(name), keys) for name, keys in _WITHOUT_EFFECT.items()}
    return {
        "model": run.inputs.config_tree,
        "teacher": teacher.hf_config.to_dict() if (teacher := run.inputs.model.teacher) is not None else None,
        "run": sections,
        "packing": run.config.data.packing,
        "rows": _row_sizes(run),
        "layout": [str(plan.mesh), plan.world.world_size, plan.world.local_world_size],
        "deepspeed": {name: value for name, value in plan.deepspeed.items() if name not in _DERIVED},
        "loss_kernel": plan.loss_kernel,
        "versions": {**versions(), "ds_finetune": __version__},
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "devices": [[device.name, device.total_bytes] for device in undecided.devices],
    }


def _without(section: object, keys: Collection[str]) -> object:
    if not isinstance(section, Mapping):
        return section
    return {name: value for name, value in section.items() if name not in keys}


def _row_sizes(run: PreparedRun) -> str:
    """A digest of the sizes of the longest rows, as many as a rank has of a global batch."""
    rows, batch = run.inputs.train, run.plan.batch
    if isinstance(rows, StreamedRows):
        return rows.fingerprint()
    return sizes_digest(rows, batch.global_batch_size // run.plan.dp)


def _place(run: PreparedRun, key: Mapping[str, Any]) -> Path:
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True, default=str).encode())
    return Path(run.config.data.cache_dir, _FOLDER, f"{digest}.json")


def _recall(file: Path, key: Mapping[str, Any]) -> str:
    """What is remembered of a run with this key, as JSON; empty where nothing is, or nothing that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree["key"] == json.loads(json.dumps(key, default=str)):
            return json.dumps(asdict(TriedSize(**tree["choice"])))
    return ""


def _remember(file: Path, key: Mapping[str, Any], choice: TriedSize) -> None:
    """Write the choice; a folder that cannot be written means another trial at the next start."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"choice": asdict(choice), "key": key}, default=str, indent=1) + "\n")
