"""The exchange of rows between expert parallel ranks, awaited at once and beside the shared experts.

    torchrun --nproc-per-node 2 bench/experts_overlap.py

Steps of a small DeepSeek-V3 with `ep` over all ranks and one shared expert as wide as four routed ones, by turns with
and without the overlap. It prints, of rank zero, the median seconds of a step, the share of it that waits in an
all-to-all (`comm/all_to_all_share`), and whether all losses are equal. On CPUs the exchange runs in a thread of gloo's,
so it needs a core beside those of the ranks; on GPUs NCCL has streams of its own, and its share has to be read from a
profile (`profile.steps`).
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import environ
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.small_v3 import SMALL_V3
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, BatchPlan, training_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.parallel.expert import ExpertParallelExperts
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model

ROUNDS, ROWS, TOKENS = 4, 4, 512
MODEL = SMALL_V3 | {"n_shared_experts": 4}


def main() -> None:
    """Print a line for each way."""
    world, device = World.from_environment(environ), choose_device()
    found: dict[str, list[tuple[float, float, float]]] = {"apart": [], "beside shared experts": []}
    with tempfile.TemporaryDirectory() as folder, process_group(world, device):
        AutoConfig.for_model("deepseek_v3", **MODEL).save_pretrained(folder)
        config = _config(folder, world.world_size)
        plan = make_plan(RunSettings.of(config), world=world, device=device)
        shares = BatchPlan(ROWS, ROWS // world.world_size, plan.mesh.coordinate("dp"), plan.dp, 0, False, 0, TOKENS)
        (batch,) = training_batches(_rows(), shares, start_step=0, total_rows=ROWS)
        with start_engine(plan, plan_model(read_hf_config(folder), RunSettings.of(config))) as engine:
            _step(engine, batch)
            for _, way in itertools.product(range(ROUNDS), found):
                with _exchange_apart(engine) if way == "apart" else nullcontext():
                    found[way].append(_step(engine, batch))
    if world.rank == 0:
        for way, steps in found.items():
            seconds, share, losses = zip(*steps, strict=True)
            sys.stdout.write(
                f"{way}: {statistics.median(seconds):.3f} s a step, {statistics.median(share):.1%} of it in an "
                f"all-to-all; losses {set(losses)}\n"
            )


def _config(folder: str, ranks: int) -> RunConfig:
    train = {"for": "1 steps", "global_batch_size": ROWS, "micro_batch_size": ROWS // ranks, "max_seq_len": TOKENS}
    train |= {"precision": "fp32", "activation_checkpointing": "none"}
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "weights": "random"},
            "data": {"train": "none.jsonl"},
            "train": train,
            "parallel": {"ep": ranks},
            "deepspeed": {"zero_optimization": {"stage": 1}},
            "output_dir": folder,
        }
    )


def _rows() -> list[Row]:
    ids = np.random.default_rng(0).integers(3, 8192, size=(ROWS, TOKENS)).astype(np.int32)
    places = np.arange(TOKENS, dtype=np.int32)
    return [Row(input_ids=row, position_ids=places, labels=row, supervised=TOKENS) for row in ids]


def _step(engine: Engine, batch: Batch) -> tuple[float, float, float]:
    """Seconds, the share of them in an all-to-all (0 on GPUs) and the loss; the weights stay the same."""
    began = time.perf_counter()
    result = engine.step(batch, lr=0.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert result.communication is not None
    waited = (result.communication.seconds or {}).get("all_to_all", 0.0)
    return seconds, waited / seconds, result.loss


@contextmanager
def _exchange_apart(engine: Engine) -> Iterator[None]:
    """While open, shared experts are computed after the routed ones."""
    experts = [module for module in engine.lm.modules() if isinstance(module, ExpertParallelExperts)]
    kept = [module.compute_meanwhile for module in experts]
    for module in experts:
        module.compute_meanwhile = None
    yield
    for module, compute in zip(experts, kept, strict=True):
        module.compute_meanwhile = compute


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
