"""Resolves `train.activation_checkpointing: auto` and `train.micro_batch_size: auto` by the memory estimate."""

import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import xxhash

from ds_finetune import __version__
from ds_finetune.checkpoint.run_state import versions
from ds_finetune.config.units import GIB
from ds_finetune.engine.groups.default_group import JoinedRanks
from ds_finetune.errors import ConfigError
from ds_finetune.plan.batch import AUTO
from ds_finetune.plan.search.fitting import SPARE, chosen_recomputation, fits
from ds_finetune.trainer.forecast import memory_table, what_fits
from ds_finetune.trainer.prepare import PreparedRun


def decide_recomputation(run: PreparedRun, ranks: JoinedRanks) -> PreparedRun:
    """Resolve `train.activation_checkpointing: auto` for the device with the least memory among all ranks.

    With `auto` this function is collective: ranks that recompute differently would hang in exchanges.
    """
    plan = run.plan
    if plan.train.activation_checkpointing != AUTO:
        return run
    budget = None
    if plan.device != "cpu":
        own = json.dumps(run.memory.total_bytes if run.memory is not None else 0)
        sizes = ranks.exchange("memory of devices", own)
        budget = min(map(int, sizes)) or None
    recomputation, reason = chosen_recomputation(run.needs, budget=budget)
    line = ("recomputation", f"{recomputation} (auto: {reason})")
    return replace(run, plan=plan.with_recomputation(recomputation).with_lines(line))


def decide_micro_batch(run: PreparedRun, ranks: JoinedRanks) -> PreparedRun:
    """Resolve `train.micro_batch_size: auto` to the largest size that fits by the estimate. If an earlier start ran
    out of memory, the result is at most half of the size at that time.

    This function is collective and runs before there is a process group. ConfigError on every rank if no micro-batch
    fits, or if the memory of the device or of the model is not known.
    """
    if run.plan.train.micro_batch_size != AUTO:
        return run
    if run.memory is None:
        raise ConfigError(
            f"train.micro_batch_size auto: {sys.platform} does not say how much memory is free",
            hint="set train.micro_batch_size to a number",
        )
    texts = ranks.exchange("memory", json.dumps(asdict(run.memory)))
    budget = min(json.loads(text)["free_bytes"] for text in texts)
    estimates = {rows: run.needs.bytes_of(rows) for rows in run.plan.legal_micro_batches}
    file = _file(run, estimates, [json.loads(text)["total_bytes"] for text in texts])
    # Hosts may have read different failed micro-batch sizes, because each host has its own cache.
    failed = ranks.exchange("micro-batch without memory", str(failed_size(file)))
    too_many = min(filter(None, map(int, failed)), default=0)
    sizes = [size for size in estimates if not too_many or size <= too_many // 2]
    rows = max((size for size in sizes if fits(estimates[size], budget)), default=0)
    if not rows:
        raise _nothing_fits(run, budget, too_many)
    how = f"{estimates[rows] / GIB:.3f} GiB at most of {budget / GIB:.3f} GiB that are free, by the estimate"
    how += f"; {too_many} ran out of memory before" if too_many else ""
    plan = run.plan.with_rows(rows).with_lines(("micro batch", f"{rows} (auto: {how})"))
    return replace(run, plan=plan, failed_size=file)


def failed_size(file: Path) -> int:
    """Micro-batch size that ran out of memory in an earlier run, read from `file`; 0 if there is none."""
    with suppress(OSError, ValueError):
        return int(file.read_text(encoding="utf-8"))
    return 0


def _nothing_fits(run: PreparedRun, budget: int, too_many: int) -> ConfigError:
    plan = run.plan.with_rows(1)
    estimate = run.needs.with_plan(plan).estimate()
    need, has = estimate.device_bytes / GIB, budget / GIB
    failed = f", and {too_many} rows ran out of memory before" if too_many else ""
    table, remedy = "\n".join(memory_table(estimate)), what_fits(replace(run, plan=plan), budget=budget)
    return ConfigError(
        f"train.micro_batch_size auto: not even forwards of one row leave {SPARE:.0%} of the memory free; a rank needs "
        f"{need:.3f} GiB by the estimate and has {has:.3f} GiB{failed}:\n{table}",
        hint=remedy,
    )


def _file(run: PreparedRun, estimates: dict[int, int], devices: list[int]) -> Path:
    """File that records the micro-batch size with which the run ran out of memory. The file name is a hash of training
    data, devices, layout, versions and memory estimates, which cover every setting that affects memory.
    """
    plan, rows = run.plan, run.inputs.train.fingerprint()
    key = [__version__, versions(), rows, devices, str(plan.mesh), plan.zero, estimates]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True, default=str).encode())
    return Path(run.config.data.cache_dir, "micro-batch", f"{digest}.failed")
