"""Compares sampled answers in batches with one prompt at a time: tokens per second of `Engine.sample`.

    OMP_NUM_THREADS=2 python -m bench.sampling [MODEL] [--rows 1 8 32] [--tokens 64] [--prompt 48]

MODEL is a folder with config.json, whose weights are random; without it a Llama of 21 million parameters is written to
a temporary folder. Batches take turns, and the medians of all rounds are printed, with that of `Engine.generate`,
which answers one prompt at a time; CPU seconds are those of all threads, and tell more where others use the cores.
Prompts have different lengths, from half of `--prompt` tokens on.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.generation import config_of
from ds_finetune.cli.main import exit_process
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.sampling.answers import PromptToSample, SamplingLimits, SamplingRequest
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import make_model_plan

LLAMA = {"model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408}
LLAMA |= {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}


def main() -> None:
    """Measure on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    world, device = World.from_environment(os.environ), choose_device()
    with tempfile.TemporaryDirectory() as out, process_group(world, device):
        (Path(out) / "config.json").write_text(json.dumps(LLAMA))
        config = config_of(asked.model or Path(out), 0, out)
        plan = make_plan(RunSettings.of(config), world=world, device=device)
        with start_engine(plan, make_model_plan(RunSettings.of(config, mesh=plan.mesh))) as engine:
            number = sum(param.numel() for param in engine.lm.parameters())
            say(f"{number:,} parameters, {torch.get_num_threads()} threads")
            compare(engine, asked)


def compare(engine: Engine, asked: argparse.Namespace) -> None:
    """Print the tokens per second of each number of rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(asked.prompt // 2, asked.prompt + 1, (asked.prompts,), generator=generator).tolist()
    ids = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
    prompts = [PromptToSample(number, prompt, 0) for number, prompt in enumerate(ids)]
    limits = SamplingLimits(asked.tokens, ())
    ways: dict[str, Callable[[], int]] = {"one prompt at a time, greedy (generate)": lambda: greedy(engine, ids, asked)}
    for rows in asked.rows:
        ways[f"{rows} rows (sample)"] = lambda rows=rows: sampled(engine, prompts, limits, asked.group, rows)
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            began, used = time.perf_counter(), time.process_time()
            tokens = way()
            speeds[name].append((tokens / (time.perf_counter() - began), tokens / (time.process_time() - used)))
    first: tuple[float, float] | None = None
    for name, each in speeds.items():
        wall, cpu = map(statistics.median, zip(*each, strict=True))
        first = first or (wall, cpu)
        times = f"{wall / first[0]:.1f} and {cpu / first[1]:.1f} times the first"
        say(f"{name:42s} {wall:7,.0f} tokens/s, {cpu:7,.0f} per CPU second: {times}")


def greedy(engine: Engine, ids: list[list[int]], asked: argparse.Namespace) -> int:
    """Number of tokens of greedy answers, one prompt at a time."""
    answers = engine.generate(ids, SamplingLimits(asked.tokens, ()))
    assert answers is not None
    return sum(map(len, answers))


def sampled(engine: Engine, prompts: list[PromptToSample], limits: SamplingLimits, group: int, rows: int) -> int:
    """Number of sampled tokens."""
    answers = engine.sample(SamplingRequest(prompts, group, limits, seed=0, batch_rows=rows))
    assert answers is not None
    return sum(len(answer.ids) for part in answers for answer in part)


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
    exit_process()
