"""Compares training by rewards with TRL's: tokens per second of the same model, prompts, rewards and cores.

    OMP_NUM_THREADS=2 python -m bench.rewards_trl FOLDER --trl PYTHON [--steps 6] [--rounds 1]

PYTHON is that of an environment with TRL 1.16 and the packages of this one. Both train the tiny DeepSeek-V3 of
bench/rewards_dates.py, after its short fine-tuning, by exact match: steps of 32 prompts with 8 answers each, fp32,
temperature 1, no reference, every answer of a step generated at a time, and padded forwards of 64 answers. Runs take
turns. What a step takes is the difference of runs of one step and of more; CPU seconds are those of all processes of a
run, and tell more where others use the cores. All answers of a step are generated and trained, so tokens are those of
answers.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.rewards_dates import make_start, run_file, scores, train

PROMPTS, GROUP, NEW, FORWARD_ROWS = 32, 8, 24, 64
LR = 1e-6
"""So low that answers stay as long as they are."""


class Taken(NamedTuple):
    """What a run took, and the tokens of its answers."""

    wall: float
    cpu: float
    tokens: float


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    start = make_start(asked.folder)
    sides = {"this program": ours, "TRL": lambda *given: trls(asked.trl, *given)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for side in sides.values():
        # The first run of each prepares the data, which others read.
        side(asked.folder, start, 1)
    for _ in range(asked.rounds):
        for name, side in sides.items():
            one, more = (side(asked.folder, start, 1 + steps) for steps in (0, asked.steps))
            tokens = more.tokens - one.tokens
            found[name].append((tokens / (more.wall - one.wall), tokens / (more.cpu - one.cpu)))
            wall, cpu = found[name][-1]
            say(f"{name:12s} {tokens:7,.0f} tokens: {wall:7,.0f} tokens/s, {cpu:7,.0f} per CPU second")
    for kind, place in (("second", 0), ("CPU second", 1)):
        ratios = [a[place] / b[place] for a, b in zip(*found.values(), strict=True)]
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        say(f"tokens per {kind}, times TRL's: {each}; median {statistics.median(ratios):.1f}")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def ours(folder: Path, start: Path, steps: int) -> Taken:
    """A run of this program."""
    run = folder / f"full-{steps}-steps"
    # A run folder that is there would be resumed.
    shutil.rmtree(run, ignore_errors=True)
    asked = argparse.Namespace(lr=LR, steps=steps)
    path, off = (
        run_file(run, start, 0, asked),
        ["checkpoint.every=never", "export.at_end=false", "log.every=1"],
    )
    off += ["optim.warmup=0 steps", f"train.micro_batch_size={FORWARD_ROWS}", "data.packing=false"]
    wall, cpu = timed(lambda: train(path, *off))
    return Taken(wall, cpu, PROMPTS * GROUP * sum(scores(run, "rollout/answer_tokens")))


def trls(python: Path, folder: Path, start: Path, steps: int) -> Taken:
    """A run of TRL."""
    out = folder / f"trl-{steps}-steps.json"
    command = [str(python), __file__, str(start), str(folder / "demo/train.jsonl"), str(out), str(steps)]
    with out.with_suffix(".log").open("w") as log:
        wall, cpu = timed(lambda: subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT))
    return Taken(wall, cpu, PROMPTS * GROUP * sum(json.loads(out.read_text())))


def timed(call: Any) -> tuple[float, float]:  # noqa: ANN401 - a function without arguments
    """Seconds of a call that starts processes, and CPU seconds of these."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def train_by_trl(start: str, rows: str, out: str, steps: str) -> None:
    """Train with TRL, and write the mean tokens of an answer in each step."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def exact_match(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        return [float(turn[0]["content"].strip() == wanted) for turn, wanted in zip(completions, answer, strict=True)]

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    # The JSON loader of `datasets` would make times of the dates.
    read = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["completion"]} for row in read]
    )
    config = GRPOConfig(
        output_dir=f"{out}.run",
        per_device_train_batch_size=FORWARD_ROWS,
        gradient_accumulation_steps=PROMPTS * GROUP // FORWARD_ROWS,
        num_generations=GROUP,
        max_completion_length=NEW,
        max_steps=int(steps),
        learning_rate=LR,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(start, exact_match, config, data)
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "loss" in log]
    Path(out).write_text(json.dumps(lengths))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith("export"):
        train_by_trl(*sys.argv[1:])
    else:
        main()
