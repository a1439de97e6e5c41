"""How long pipeline ranks wait, with one and with several chunks of layers on each, beside theory.

    torchrun --nproc-per-node 2 bench/pipeline_bubble.py            # the schedules, with any number of ranks
    torchrun --nproc-per-node 2 bench/pipeline_bubble.py --steps    # steps of a model, one rank on each core

The share of a step that a rank waits is (p - 1) / (v m + p - 1) for m micro-batches on p ranks with v chunks each, if
all chunks take the same time and messages take none (arXiv 2104.04473, section 2.2).

Without `--steps` the run's own schedules send their messages between the ranks, and each forward and backward of a
chunk sleeps instead of computing: 80 / v and 160 / v ms. So ranks do not take cores from each other, and the table
shows only schedule and messages. The share is 1 - slept / whole, a median over steps and the mean over ranks.

With `--steps` a Llama of eight equal layers (hidden 256, fp32, rows of 512 tokens) takes optimizer steps with each v by
turns, in the same process. Reported are the seconds of a step, and the share of it in which no thread of a rank
computed: 1 - CPU seconds / whole, with one thread a rank. Needs a core for each rank that nothing else uses.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.data.batches import Batch, BatchPlan, training_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_scalar
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.groups.process_groups import open_groups
from ds_finetune.engine.pipeline_schedules import StageForward, run_pipeline
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.parallel.pipeline import PipelineGroup
from ds_finetune.plan.batch import idle_fraction
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model

FORWARD_SECONDS, BACKWARD_SECONDS = 0.08, 0.16
"""Of all chunks of a rank together."""
CHUNKS, TIMES = (1, 2, 4), (1, 2, 4)
"""Chunks a rank, and micro-batches as multiples of the number of ranks."""
WIDTH, TOKENS, LAYERS, ROUNDS = 256, 512, 8, 5
SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": 768,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}
"""Nearly all of its work is in its layers, so that equal chunks take as long."""


class Measured(NamedTuple):
    """Median seconds of a step, and the mean over ranks of the share of it that they waited."""

    seconds: float
    idle: float


class SleepingChunks:
    """Forward and backward of chunks that take a known time and no core."""

    def __init__(self, stage: PipelineGroup) -> None:
        self._stage = stage
        self._weight = torch.ones((), requires_grad=True)
        self.slept = 0.0

    def forward(self, rows: ForwardRows) -> StageForward:
        """Pass hidden states on, after the time of a forward."""
        stage = self._stage
        if stage.num_chunks == 1 and not stage.is_first:
            hidden = stage.receive(stage.empty_hidden(rows.input_ids), source=stage.previous_rank)
            stage.input_hidden_states = hidden.requires_grad_()
        given = stage.input_hidden_states
        self._sleep(FORWARD_SECONDS)
        if given is None:
            given = stage.empty_hidden(rows.input_ids).zero_()
        hidden = given * self._weight
        runs_head = stage.is_last if stage.num_chunks == 1 else stage.runs_head
        return StageForward(hidden.sum() if runs_head else None, None if runs_head else hidden)

    def backward(self, scalar: torch.Tensor) -> None:
        """Compute the gradient of the hidden states, after the time of a backward."""
        self._sleep(BACKWARD_SECONDS)
        scalar.backward()  # type: ignore[no-untyped-call]

    def _sleep(self, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds / self._stage.num_chunks)
        self.slept += time.perf_counter() - began


def measure_schedule(world: World, chunks: int, micro_batches: int) -> Measured:
    """Steps of sleeping chunks, after one that is not counted."""
    mesh = Mesh.of(ParallelConfig(pp=world.world_size), world_size=world.world_size, rank=world.rank)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    every = [ForwardRows(ids, ids, ids)] * micro_batches
    found = []
    with open_groups(mesh, vpp=chunks) as groups:
        assert groups.stage is not None
        groups.stage.no_hidden_states = torch.empty(0, WIDTH)
        for _ in range(ROUNDS + 1):
            ranks = SleepingChunks(groups.stage)
            dist.barrier()
            began = time.perf_counter()
            run_pipeline(groups.stage, every, ranks.forward, ranks.backward)
            dist.barrier()
            whole = time.perf_counter() - began
            found.append(
                Measured(max(all_gather_scalar(whole)), statistics.mean(all_gather_scalar(1 - ranks.slept / whole)))
            )
    return _median(found[1:])


def _median(found: list[Measured]) -> Measured:
    return Measured(*(statistics.median(values) for values in zip(*found, strict=True)))


def measure_steps(world: World, device: str, micro_batches: int, folder: str) -> dict[int, Measured]:
    """Optimizer steps of the model with each number of chunks, by turns."""
    found: dict[int, list[Measured]] = {chunks: [] for chunks in CHUNKS if chunks * world.world_size <= LAYERS}
    with ExitStack() as stack:
        engines = {}
        for chunks in found:
            config = _run_file(world, chunks, micro_batches, folder)
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            model = plan_model(read_hf_config(folder), RunSettings.of(config))
            engines[chunks] = stack.enter_context(start_engine(plan, model))
        for _ in range(ROUNDS + 1):
            for chunks, engine in engines.items():
                found[chunks].append(_step(engine, next(_batches(micro_batches))))
    return {chunks: _median(rounds[1:]) for chunks, rounds in found.items()}


def _step(engine: Engine, batch: Batch) -> Measured:
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    engine.step(batch, lr=1e-3)
    whole, busy = time.perf_counter() - began, time.process_time() - cpu
    return Measured(max(all_gather_scalar(whole)), statistics.mean(all_gather_scalar(1 - busy / whole)))


def _run_file(world: World, chunks: int, micro_batches: int, folder: str) -> RunConfig:
    pp = world.world_size
    parallel = {"pp": pp, "vpp": chunks, "pp_layers": [LAYERS // (pp * chunks)] * (pp * chunks)}
    sizes = {"global_batch_size": micro_batches, "micro_batch_size": 1, "max_seq_len": TOKENS}
    tree = {
        "model": {"path": folder, "weights": "random"},
        "data": {"train": "none.jsonl"},
        "parallel": parallel,
        "train": {"for": "9 steps", "precision": "fp32", "activation_checkpointing": "none", **sizes},
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "output_dir": folder,
    }
    return RunConfig.model_validate(tree)


def _batches(micro_batches: int) -> Iterator[Batch]:
    drawn = torch.randint(3, SMALL["vocab_size"], (micro_batches, TOKENS), generator=torch.Generator().manual_seed(0))
    places = torch.arange(TOKENS).int().numpy()
    rows = [Row(input_ids=row, position_ids=places, labels=row, supervised=TOKENS) for row in drawn.int().numpy()]
    return training_batches(
        rows, BatchPlan(micro_batches, 1, 0, 1, 0, False, 0, TOKENS), start_step=0, total_rows=micro_batches
    )


def main() -> None:
    """Print a table, a line for each number of micro-batches and of chunks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true")
    arguments = parser.parse_args()
    world, device = World.from_environment(os.environ), choose_device()
    torch.set_num_threads(1)
    measure: Callable[[int, str], dict[int, Measured]] = (
        (lambda micro_batches, folder: measure_steps(world, device, micro_batches, folder))
        if arguments.steps
        else (lambda micro_batches, _: {chunks: measure_schedule(world, chunks, micro_batches) for chunks in CHUNKS})
    )
    with process_group(world, device), tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("llama", **SMALL).save_pretrained(folder)
        _say(world, "| ranks | micro-batches | chunks a rank | ms a step | waits | theory | step / 1 chunk | theory |")
        _say(world, "| --- | --- | --- | --- | --- | --- | --- | --- |")
        for micro_batches in (times * world.world_size for times in TIMES):
            found = measure(micro_batches, folder)
            for chunks, one in found.items():
                _say(world, _line(world.world_size, micro_batches, chunks, one, found[1].seconds))


def _line(ranks: int, micro_batches: int, chunks: int, found: Measured, of_one: float) -> str:
    idle, plain = (idle_fraction(pp=ranks, vpp=each, micro_batches=micro_batches) for each in (chunks, 1))
    cells = [
        str(ranks),
        str(micro_batches),
        str(chunks),
        f"{found.seconds * 1e3:.0f}",
        f"{found.idle:.1%}",
        f"{idle:.1%}",
    ]
    cells += [f"{found.seconds / of_one:.3f}", f"{(1 - plain) / (1 - idle):.3f}"]
    return f"| {' | '.join(cells)} |"


def _say(world: World, line: str) -> None:
    if world.rank == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
