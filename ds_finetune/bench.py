"""Times the training step beside plain PyTorch loops on the same documents, by turns in one process."""

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig

from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.build_lock import Say
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.prepare_ops import build_ops, use_cores
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import ConfigError
from ds_finetune.labels import IGNORE_INDEX
from ds_finetune.model.dtypes import PRECISION_DTYPES
from ds_finetune.plan.plan import make_plan
from ds_finetune.trainer.batches import run_batches
from ds_finetune.trainer.inputs import make_model_plan, read_inputs
from ds_finetune.trainer.prepare import PreparedRun, estimate_model, freeze_unreached, make_schedule
from ds_finetune.world import World

_LR = 1e-4
PADDED_DOCUMENTS = 8
"""Documents in one forward of the padded loop."""


@dataclass(frozen=True)
class SpeedComparison:
    """Seconds of each timed step of each candidate, supervised tokens of these steps, and the difference of losses."""

    seconds: dict[str, list[float]]
    supervised_tokens: int
    largest_loss_difference: float

    def lines(self) -> list[tuple[str, str]]:
        """Median seconds, supervised tokens a second, and the speed relative to the first candidate: more is faster."""
        first_name = next(iter(self.seconds))
        first = statistics.median(next(iter(self.seconds.values())))
        found = [
            ("speed (x)", f"that of {first_name} is 1; more is faster"),
            ("losses differ by", f"{self.largest_loss_difference:.1e}, relative"),
        ]
        for name, seconds in self.seconds.items():
            median = statistics.median(seconds)
            rate = self.supervised_tokens / sum(seconds)
            found.append((name, f"{median:.3f} s/step, {rate:,.0f} tokens/s, {first / median:.2f} x"))
        return found


def compare_step_speed(config: RunConfig, *, steps: int, say: Say) -> SpeedComparison:
    """Time `steps` optimizer steps of `config` by turns with plain loops over the same documents.

    One step before them warms up.

    The plain loops are transformers' model with all logits and torch's AdamW: over documents padded to the longest of
    eight, and over the same packed rows. All start from the same weights.
    """
    world = World.from_environment(os.environ)
    world.set_environment(os.environ)
    if world.world_size > 1:
        raise ConfigError(
            f"bench compares one process with a plain loop, and this is rank {world.rank} of {world.world_size}",
            hint="start one process",
        )
    if config.lora is not None:
        raise ConfigError(
            f"bench compares with loops that train every weight, and lora.rank is {config.lora.rank}",
            hint="leave `lora` out",
        )
    plan = make_plan(config, world=world, device=choose_device())
    model = make_model_plan(config, plan.mesh)
    inputs = read_inputs(config, model)
    plan, schedule = freeze_unreached(plan, model), make_schedule(config, inputs)
    run = PreparedRun(config, plan, inputs, schedule, estimate_model(config, plan, model))
    with ExitStack() as stack:
        stack.enter_context(process_group(world, run.plan.device))
        plan = build_ops(use_cores(run.plan, os.environ), all_gather_object, say)
        for note in plan.notes:
            say(note)
        engine = stack.enter_context(start_engine(plan, run.inputs.model))
        plain = {"plain loop, padded": _padded, "plain loop, packed": _packed}
        loops = {name: _PlainLoop(engine, run.inputs.hf_config, layout) for name, layout in plain.items()}
        candidates: dict[str, Callable[[Batch], float]] = {"ds_finetune": lambda batch: engine.step(batch, lr=_LR).loss}
        candidates |= {name: loop.step for name, loop in loops.items()}
        finish = torch.cuda.synchronize if plan.device == "cuda" else _nothing
        return time_by_turns(candidates, islice(run_batches(run), steps + 1), finish=finish)


def _nothing() -> None:
    """A CPU's work is done when the call returns."""


def time_by_turns(
    candidates: dict[str, Callable[[Batch], float]], batches: Iterator[Batch], *, finish: Callable[[], None]
) -> SpeedComparison:
    """Time each candidate on each batch, the first one to warm up.

    `finish` waits until the device has finished the work queued before.
    """
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
        tokens += batch.num_supervised_tokens if number else 0
        largest_difference = max(largest_difference, (max(losses) - min(losses)) / min(losses))
    return SpeedComparison(seconds, tokens, largest_difference)


Layout = Callable[[Batch], list[dict[str, torch.Tensor]]]


class _PlainLoop:
    """A copy of the engine's model as transformers builds it, trained by an ordinary PyTorch loop."""

    def __init__(self, engine: Engine, hf_config: PretrainedConfig, layout: Layout) -> None:
        self._layout = layout
        self._precision = engine.plan.precision
        self._max_norm = engine.plan.optimizer.max_grad_norm or float("inf")
        config = copy.deepcopy(hf_config)
        config._attn_implementation = "sdpa"
        self._device = engine.plan.device
        self._lm = AutoModelForCausalLM.from_config(config).to(torch.float32)
        self._lm.load_state_dict(
            {name: tensor for name, tensor in engine.tensors() if tensor is not None}, strict=False
        )
        self._lm.to(self._device).train()
        if engine.plan.activation_checkpointing:
            self._lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self._lm.parameters(), lr=_LR, betas=engine.plan.optimizer.betas, weight_decay=0.0
        )

    def step(self, batch: Batch) -> float:
        """One optimizer step; the loss is the mean over the supervised tokens of the batch."""
        total = 0.0
        is_mixed = self._precision != "fp32"
        for part in self._layout(batch):
            inputs = {name: tensor.to(self._device) for name, tensor in part.items()}
            labels = inputs.pop("labels")
            with torch.autocast(self._device, PRECISION_DTYPES[self._precision]) if is_mixed else nullcontext():
                logits = self._lm(**inputs, use_cache=False).logits
            loss = functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            (loss / batch.num_supervised_tokens).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._lm.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / batch.num_supervised_tokens


def _packed(batch: Batch) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": micro.input_ids, "position_ids": micro.position_ids, "labels": micro.labels}
        for micro in batch.micro
    ]


def _padded(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Documents of a batch in rows of their own, `PADDED_DOCUMENTS` to a forward, padded to the longest."""
    documents = [
        document for micro in batch.micro for document in _documents(micro) if bool((document[1] != IGNORE_INDEX).any())
    ]
    return [
        _stacked(documents[start : start + PADDED_DOCUMENTS]) for start in range(0, len(documents), PADDED_DOCUMENTS)
    ]


def _documents(micro: MicroBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number, (ids, labels) in enumerate(zip(micro.input_ids, micro.labels, strict=True)):
        lengths = micro.documents[number] if micro.documents else (len(ids),)
        yield from zip(ids.split(lengths), labels.split(lengths), strict=True)


def _stacked(documents: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*documents, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
    return {
        "input_ids": pad(list(ids), batch_first=True),
        "attention_mask": mask,
        "labels": pad(list(labels), True, IGNORE_INDEX),
    }
