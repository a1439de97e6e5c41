"""Log-probabilities under a run's reference model, the model before training, which are computed once and cached.

They are computed on the training rows in the micro-batches of the first epoch, since rounding depends on the shapes of
the forward: in bf16, the log-probability of a document in a packed row and of the same document by itself differ by
tenths of a nat. With the same rows and micro-batches the first loss of DPO is ln 2 in every precision. In later epochs
unpacked rows share forwards with other rows and have other padding.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.data.batches import Batch, Position, eval_baseline, eval_batches, num_eval_rows, training_batches
from ds_finetune.data.cache import ArrayParts, lock_folder, remove_damaged, write_folder
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.errors import RunError
from ds_finetune.model.adapters.peft_adapter import PeftAdapter
from ds_finetune.model.weights.load import weights_digest
from ds_finetune.trainer.batches import batch_plan
from ds_finetune.trainer.prepare import PreparedRun, mismatched_answers

LogProbs = NDArray[np.float64]
"""Log-probabilities in nats: of each document, by its index in the data, then of each mismatched document (for KTO)."""
_FORMAT = 1
"""Format number in the cache's key. It is incremented when the same rows would get other values."""
_TRAIN = "train"
_PACKAGES = ("torch", "transformers")


def find_reference(run: PreparedRun) -> dict[str, LogProbs | None]:
    """Read the cached reference log-probabilities of the training rows and of each held-out set, by name; collective.
    If a rank lacks those of a set, all ranks get None for this set, and must compute them. The result is empty if the
    run needs no cached reference.
    """
    cached: dict[str, LogProbs | None] = {}
    for name, rows in _rows(run).items():
        log_probs = _read(_folder(run, name, rows))
        cached[name] = log_probs if all(all_gather_object(log_probs is not None)) else None
    return cached


def complete_reference(run: PreparedRun, engine: Engine, cached: Mapping[str, LogProbs | None]) -> PreparedRun:
    """Add the reference log-probabilities to the run, and compute those that are not cached; collective. If any are
    computed, `engine` must have the weights of the model before training.
    """
    logps: dict[str, LogProbs] = {}
    for name, rows in _rows(run).items():
        log_probs = cached[name]
        logps[name] = _compute(run, engine, name, rows) if log_probs is None else log_probs
        if log_probs is None and run.plan.world.local_rank == 0:
            _write(_folder(run, name, rows), logps[name])
    return replace(run, reference=logps)


def _rows(run: PreparedRun) -> dict[str, PreparedRows]:
    if getattr(run.config.objective, "reference", "") != "cache":
        return {}
    assert isinstance(run.inputs.train, PreparedRows), "a stream has no cached reference"
    return {_TRAIN: run.inputs.train, **run.inputs.held_out}


def _compute(run: PreparedRun, engine: Engine, name: str, rows: PreparedRows) -> LogProbs:
    # Rows are not mixed by weights here: the first pass of a mixture repeats some rows and omits others.
    plan, limit = replace(batch_plan(run), mixture=None, reference=None), run.config.eval.limit
    mismatched = mismatched_answers(run.plan, engine.objective, rows)
    first: list[Batch] = []
    if name == _TRAIN:
        batches = training_batches(rows, plan, start_step=0, total_rows=len(rows), mismatched=mismatched)
        num_batches = -(-len(rows) // plan.global_batch_size)
    else:
        batches = eval_batches(rows, plan, limit=limit)
        forwards = () if mismatched is None else tuple(eval_baseline(mismatched, plan, limit=limit))
        first = [Batch(forwards, Position(0, 0), (), 0, {})]
        num_batches = -(-num_eval_rows(rows, limit) // (plan.micro_batch_size * plan.dp))
    what = f"reference log-probabilities of data.{name.replace('/', '.')}"
    with PhaseLine(what, num_batches, is_rank_zero=engine.is_rank_zero) as line:
        numbers, logps = engine.document_log_probs(chain(first, _with_baselines(batches, line)))
    if not np.isfinite(logps).all():
        index = int(np.flatnonzero(~np.isfinite(logps))[0])
        raise RunError(
            f"the reference model gives document {numbers[index]} of data.{name} the log-probability {logps[index]}",
            hint="check the row with `ds-finetune data show`, and the weights of model.path",
        )
    # Documents beyond eval.limit, which no batch contains, get NaN.
    values = np.full(int(numbers.max()) + 1, np.nan)
    values[numbers] = logps
    return values


def _with_baselines(batches: Iterable[Batch], line: PhaseLine) -> Iterator[Batch]:
    for batch in batches:
        yield replace(batch, micro=(*batch.baseline, *batch.micro))
        line.advance()


def _folder(run: PreparedRun, name: str, rows: PreparedRows) -> Path:
    return Path(run.config.data.cache_dir) / "reference" / _fingerprint(run, name, rows)


def _fingerprint(run: PreparedRun, name: str, rows: PreparedRows) -> str:
    """Hash of what determines the log-probabilities: weights, rows, precision, kernels, layout and micro-batch."""
    plan, config, lora = run.plan, run.config, run.config.lora
    sizes = {axis: getattr(plan.mesh, axis) for axis in ("tp", "sp", "pp", "ep")}
    # The order of unpacked rows decides which rows share a forward pass, and so their padding.
    order = None if plan.data.packing else [plan.train.seed, config.data.shuffle]
    parts = {
        "format": _FORMAT,
        "weights": f"random, seed {plan.train.seed}: {run.inputs.config_text}"
        if run.model.has_random_weights
        else weights_digest(run.inputs.folder),
        "rows": rows.fingerprint(),
        "objective": config.objective.name,
        "precision": plan.precision,
        "attention": [config.model.attention, plan.loss_kernel, plan.device],
        **({"kernels": plan.kernels.name} if plan.kernels.name != "torch" else {}),
        **({"context": config.model.context} if config.model.context is not None else {}),
        "quantize": lora.quantize if lora is not None else None,
        **({"start": [PeftAdapter.open(Path(start)).digest(), lora.scale]} if lora and (start := lora.start) else {}),
        "layout": sizes,
        "forward": [plan.micro_batch_size, plan.train.max_seq_len, order],
        "limit": config.eval.limit if name != _TRAIN else 0,
        # The seed decides which prompt a mismatched answer is paired with.
        "baseline": plan.train.seed if run.model.objective.needs_baseline else None,
        "packages": {name: version(name) for name in _PACKAGES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _read(folder: Path) -> LogProbs | None:
    saved = folder / "logps"
    if not saved.is_dir():
        return None
    with lock_folder(folder):
        remove_damaged([saved], since=time.time())
    return np.load(saved / "values.npy") if saved.is_dir() else None


def _write(folder: Path, values: LogProbs) -> None:
    with lock_folder(folder):
        if not (folder / "logps").is_dir():
            write_folder(folder / "logps", {"values": ArrayParts.of(values)}, {})
