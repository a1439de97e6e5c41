"""Times the engine's training step and ordinary PyTorch loops on the same documents, in turns in one process."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice

import torch

from ds_finetune.console.phase_line import Say
from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.ops.deepspeed_ops import build_ops, use_cores
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import ConfigError
from ds_finetune.reference.bench.plain_loop import (
    LR,
    Layout,
    PlainLoop,
    check_peft,
    load_plain_teacher,
    packed_forwards,
    padded_forwards,
)
from ds_finetune.trainer.batches import run_batches
from ds_finetune.trainer.prepare import read_run
from ds_finetune.trainer.resolve import ResolvedRun

_LAYOUTS: dict[str, Layout] = {"plain loop, padded": padded_forwards, "plain loop, packed": packed_forwards}


@dataclass(frozen=True)
class SpeedComparison:
    """Timing of the candidates (engine and PyTorch loops): seconds of each step, number of tokens of these steps, and
    largest relative difference of losses. Only supervised tokens are counted; if there are none, all tokens.
    """

    seconds: dict[str, list[float]]
    tokens: int
    largest_loss_difference: float

    def lines(self) -> list[tuple[str, str]]:
        """Lines for display: median seconds, tokens per second, and speed relative to the first candidate."""
        first_name = next(iter(self.seconds))
        first = statistics.median(next(iter(self.seconds.values())))
        lines = [
            ("speed (x)", f"that of {first_name} is 1; more is faster"),
            ("losses differ by", f"{self.largest_loss_difference:.1e}, relative"),
        ]
        for name, seconds in self.seconds.items():
            median = statistics.median(seconds)
            rate = self.tokens / sum(seconds)
            lines.append((name, f"{median:.3f} s/step, {rate:,.0f} tokens/s, {first / median:.2f} x"))
        return lines


def compare_step_speed(resolved: ResolvedRun, *, steps: int, say: Say) -> SpeedComparison:
    """Time `steps` optimizer steps of a run, in turns with PyTorch loops over the same documents, after a warm-up step.

    The loops use transformers' model with the logits of all tokens, and torch's AdamW. One pads documents, eight per
    forward pass. For language models, another loop uses the engine's packed rows. All candidates start from the same
    weights, and adapters are peft's. Log-probabilities of a reference model are computed in advance, or by every
    candidate with its adapters disabled. ConfigError if there are several processes, or if adapters are trained and
    peft is not installed.
    """
    world = resolved.plan.world
    world.set_environment(os.environ)
    if world.world_size > 1:
        raise ConfigError(
            f"bench runs in one process, and this is rank {world.rank} of {world.world_size}",
            hint="start bench without a launcher",
        )
    check_peft(model := resolved.model)
    run = read_run(resolved)
    with ExitStack() as stack:
        stack.enter_context(process_group(world, run.plan.device))
        plan = build_ops(use_cores(run.plan, os.environ), all_gather_object, say)
        for note in plan.notes:
            say(note)
        engine = stack.enter_context(start_engine(plan, run.inputs.model))
        # transformers classifies by one token per row, so each row must have a single document.
        layouts = _LAYOUTS if model.task == "causal_lm" else {"plain loop, padded": padded_forwards}
        teacher = load_plain_teacher(model.teacher, plan.device)
        loops = {name: PlainLoop(engine, model, layout, teacher=teacher) for name, layout in layouts.items()}
        candidates: dict[str, Callable[[Batch], float]] = {"ds_finetune": lambda batch: engine.step(batch, lr=LR).loss}
        candidates |= {name: loop.step for name, loop in loops.items()}
        finish = torch.cuda.synchronize if plan.device == "cuda" else lambda: None
        batches = with_reference(engine, islice(run_batches(run), steps + 1))
        return time_by_turns(candidates, batches, finish=finish)


def with_reference(engine: Engine, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Add the current model's log-probabilities to batches as the reference model's, if the objective needs them."""
    if not engine.objective.needs_reference or engine.objective.reference_from_adapters:
        return batches
    all_batches = list(batches)
    numbers, logps = engine.document_log_probs(
        replace(batch, micro=(*batch.baseline, *batch.micro)) for batch in all_batches
    )
    of_document = dict(zip(numbers.tolist(), logps.tolist(), strict=True))

    def refer(micro: MicroBatch) -> MicroBatch:
        assert micro.examples is not None
        reference = [of_document[number] for number in micro.examples.numbers.tolist()]
        return replace(micro, examples=replace(micro.examples, reference=torch.tensor(reference, dtype=torch.float64)))

    return (
        replace(batch, micro=tuple(map(refer, batch.micro)), baseline=tuple(map(refer, batch.baseline)))
        for batch in all_batches
    )


def time_by_turns(
    candidates: dict[str, Callable[[Batch], float]], batches: Iterator[Batch], *, finish: Callable[[], None]
) -> SpeedComparison:
    """Time each candidate on each batch, after a warm-up on the first. `finish` waits for the device's work."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    tokens, largest_difference = 0, 0.0
    for number, batch in enumerate(batches):
        losses = []
        for name, step in candidates.items():
            finish()
            began = time.perf_counter()
            losses.append(step(batch))
            finish()
            if number:
                seconds[name].append(time.perf_counter() - began)
        tokens += (batch.num_supervised_tokens or batch.num_tokens) if number else 0
        largest_difference = max(largest_difference, (max(losses) - min(losses)) / min(losses))
    return SpeedComparison(seconds, tokens, largest_difference)
