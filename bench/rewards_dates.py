"""Rewards teach a tiny DeepSeek-V3 what a short fine-tuning has left open: the dates of the embedded example.

`python bench/rewards_dates.py FOLDER` fine-tunes the model to about 30% of held-out dates, then trains it by rewards
only, with three seeds, all weights and LoRA, and prints a row for each run: share of right held-out dates before and
after, steps, and seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

START_STEPS = 84
STEPS = 150
EVERY = 30


TRAIN = Path(__file__).parents[1] / "ds_finetune/train.py"


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, help="learning rate (default: 5e-4, with LoRA 1e-3)")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    start = make_start(folder)
    before = scores(start.parent, "eval/exact_match")[-1]
    _print("| weights | seed | held-out dates before | after | curve | steps | seconds |")
    _print("| --- | --- | --- | --- | --- | --- | --- |")
    for way in arguments.ways:
        for seed in arguments.seeds:
            began = time.monotonic()
            run = folder / f"{way}-{seed}"
            train(run_file(run, start, seed, arguments))
            curve = [before, *scores(run, "eval/reward")]
            shown = ", ".join(f"{share:.3f}" for share in curve)
            seconds = time.monotonic() - began
            results = (way, seed, f"{curve[0]:.3f}", f"{curve[-1]:.3f}", shown, arguments.steps, f"{seconds:.0f}")
            _print(f"| {' | '.join(map(str, results))} |")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def make_start(folder: Path) -> Path:
    """The export of a short fine-tuning, made once."""
    export = folder / "start" / "export"
    if not export.is_dir():
        subprocess.run([sys.executable, "-m", "ds_finetune", "demo", str(folder / "demo"), "--ranks", "1"], check=True)
        train(folder / "demo" / "run.yaml", f"train.for={START_STEPS} steps", f"output_dir={folder}/start")
    return export


def run_file(run: Path, start: Path, seed: int, arguments: argparse.Namespace) -> Path:
    """The run file of one run."""
    folder, way = run.parent, run.name.partition("-")[0]
    lr = arguments.lr or {"full": 5e-4, "lora": 1e-3}[way]
    tree = {
        "model": str(start),
        "objective": {"name": "grpo", "group_size": 8, "advantage": "mean_std"},
        "rollout": {"prompts_per_step": 32, "max_new_tokens": 24},
        "rewards": [{"reward": "exact_match", "column": "completion"}],
        "data": {"train": f"{folder}/demo/train.jsonl", "eval": f"{folder}/demo/eval.jsonl", "packing": True},
        "train": {
            "for": f"{arguments.steps} steps",
            "micro_batch_size": 4,
            "max_seq_len": 512,
            "precision": "fp32",
            "activation_checkpointing": "none",
            "seed": seed,
        },
        "optim": {"lr": lr, "warmup": "10 steps", "lr_scheduler": "constant", "weight_decay": 0.0},
        "eval": {"every": f"{EVERY} steps", "limit": 100, "keep_best": False},
        "deepspeed": {"zero_optimization": {"stage": 0}},
        "log": {"every": 10, "trackers": []},
        "output_dir": str(run),
    }
    if way == "lora":
        tree["lora"] = {"rank": 16}
    path = folder / f"{way}-{seed}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def train(path: Path, *overrides: str, ranks: int = 1) -> None:
    """Train as a run file says; its output goes to a log beside it."""
    with path.with_suffix(".log").open("w") as log:
        command = [*on_ranks(sys.executable, ranks), str(TRAIN), str(path), *overrides]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env={**os.environ})


def on_ranks(python: str | Path, ranks: int) -> list[str]:
    """The begin of a command that starts a file with so many processes on this machine."""
    return [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def scores(run: Path, name: str) -> list[float]:
    """A metric of held-out dates at each evaluation of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


if __name__ == "__main__":
    main()
