"""The training loop: a generator of step records, and observers that receive each record."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

from ds_finetune.config.schedule import LrSchedule
from ds_finetune.config.units import GIB
from ds_finetune.data.batches import Batch
from ds_finetune.engine.devices import peak_bytes
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.results import StepResult
from ds_finetune.observers.record import Observer, StepRecord


@dataclass(frozen=True)
class Progress:
    """Progress of a run: number of optimizer steps, how many of them were skipped, and number of tokens seen."""

    step: int = 0
    skipped_steps: int = 0
    tokens_seen: int = 0


BEGINNING = Progress()
"""Progress before the first step."""


def training_steps(
    engine: Engine, batches: Iterable[Batch], schedule: LrSchedule, *, after: Progress = BEGINNING
) -> Iterator[StepRecord]:
    """Take the remaining optimizer steps, up to `schedule.steps`, and yield a record of each. `batches` begin with the
    batch of the first remaining step. Skipped steps do not advance the learning rate.
    """
    seen, skipped = after.tokens_seen, after.skipped_steps
    waited_from = time.perf_counter()
    for step, batch in enumerate(batches, start=after.step + 1):
        began = time.perf_counter()
        lr = schedule.at(step - skipped)
        result = engine.step(batch, lr=lr)
        ended = time.perf_counter()
        seen, skipped = seen + result.num_tokens, skipped + result.skipped
        values = step_values(result, seconds=ended - waited_from, waited=began - waited_from)
        values |= {"optim/lr": lr, "data/tokens_seen": seen, "train/skipped_steps": skipped}
        values["memory/peak_gib"] = peak_bytes(engine.plan.device) / GIB
        yield StepRecord(
            step,
            values,
            is_last=step >= schedule.steps,
            notice=result.culprit,
            position=astuple(batch.position),
            counted=result.counted,
        )
        waited_from = time.perf_counter()


def run_steps(steps: Iterable[StepRecord], observers: Sequence[Observer]) -> StepRecord | None:
    """Pass each record through the observers, in order. Returns the last record, or None if there was no step."""
    last = None
    for record in steps:
        last = record
        for observer in observers:
            last = observer.after_step(last)
        if last.stop:
            break
    return last


def step_values(result: StepResult, *, seconds: float, waited: float) -> dict[str, float]:
    """Metrics of one step. `seconds` is the duration of the step, including `waited`, the wait for data. Without
    supervised tokens, as in classification, examples are counted instead.
    """
    is_labelled = result.num_examples > 0 and not result.num_supervised_tokens
    unit, number = (
        ("examples", result.num_examples) if is_labelled else ("supervised_tokens", result.num_supervised_tokens)
    )
    communication = result.communication.metrics(step_seconds=seconds) if result.communication else {}
    return {
        **{f"train/{name}": value for name, value in result.metrics.items()},
        "train/grad_norm": result.grad_norm,
        "train/skipped": float(result.skipped),
        f"data/{unit}": number,
        "perf/tokens_per_second": result.num_tokens / seconds,
        f"perf/{unit}_per_second": number / seconds,
        "perf/step_seconds": seconds,
        "perf/data_wait_seconds": waited,
        **communication,
    }
