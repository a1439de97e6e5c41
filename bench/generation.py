"""Times the first answers of an engine under ZeRO-2 and ZeRO-3, as an evaluation with `eval.generate` asks for them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 bench/generation.py MODEL [--rounds 3]

MODEL is a folder with config.json; weights are random, the same under both. Engines take turns; each answers the same
prompts right after it has started, and once more. Rank zero prints the seconds of each, whether the answers are the
same tokens, and the ratio of the medians.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import make_model_plan

STAGES = (2, 3)


def main() -> None:
    """Measure on every rank, and print on rank zero."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    world, device = World.from_environment(os.environ), choose_device()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 500, (40,), generator=generator).tolist() for _ in range(asked.prompts)]
    seconds: dict[int, list[list[float]]] = {stage: [] for stage in STAGES}
    answers: list[list[list[int]]] = []
    with tempfile.TemporaryDirectory() as out, process_group(world, device):
        for _, stage in product(range(asked.rounds), STAGES):
            found, answer = answer_twice(config_of(asked.model, stage, out), world, device, (prompts, asked.tokens))
            seconds[stage].append(found)
            answers.append(answer)
    if world.rank == 0:
        for stage, rounds in seconds.items():
            say(f"ZeRO-{stage}, seconds first and again: " + "  ".join(f"{a:.2f} {b:.2f}" for a, b in rounds))
        first = {stage: statistics.median(each[0] for each in rounds) for stage, rounds in seconds.items()}
        say(f"ZeRO-3 / ZeRO-2, first answers: {first[3] / first[2]:.2f}; the same tokens: {same(answers)}")


def config_of(model: Path, stage: int, out: str) -> RunConfig:
    """A run file with random weights."""
    tree = {"model": {"path": str(model), "weights": "random"}, "data": {"train": "none.jsonl"}, "output_dir": out}
    tree |= {"deepspeed": {"zero_optimization": {"stage": stage}}}
    return RunConfig.model_validate(tree | {"train": {"global_batch_size": 8, "precision": "fp32"}})


def answer_twice(
    config: RunConfig, world: World, device: str, asked: tuple[list[list[int]], int]
) -> tuple[list[float], list[list[int]]]:
    """Seconds of the first and second answers of a fresh engine, and the answers."""
    plan = make_plan(RunSettings.of(config), world=world, device=device)
    prompts, tokens = asked
    limits, seconds, answers = SamplingLimits(tokens, ()), [], None
    with start_engine(plan, make_model_plan(RunSettings.of(config, mesh=plan.mesh))) as engine:
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter()
            answers = engine.generate(prompts, limits)
            seconds.append(time.perf_counter() - began)
    assert answers is not None
    return seconds, answers


def same(answers: list[list[list[int]]]) -> bool:
    """Whether all answers are the same tokens."""
    return all(each == answers[0] for each in answers)


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
    exit_process()
