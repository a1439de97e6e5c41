"""Trains with an inexact option of DeepSpeed and without it, by turns, and prints how far the losses are apart.

    python bench/inexact_options.py MODEL TRAIN.jsonl EVAL.jsonl [--options zenflow ...] [--steps 40] [--rounds 1]

MODEL is a folder of a dense model with weights; rows have `question` and `answer`, as GSM8K's. Each option runs beside
the run that differs only in it: same weights, rows, ranks and learning rates. Printed are losses of both, the largest
difference over all steps, the held-out loss, MiB that a rank sends in a step, and the median seconds of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Tree = dict[str, Any]
OFFLOAD: Tree = {"offload_optimizer": {"device": "cpu"}}
ZENFLOW = {"select_strategy": "step", "select_interval": 16, "update_interval": 4, "topk_ratio": 0.1}
CASES: dict[str, tuple[int, str, Tree, Tree]] = {
    "bf16_reduction": (2, "fp32", {"zero_optimization": {"stage": 2}}, {"communication_data_type": "bf16"}),
    "zenflow": (
        2,
        "bf16",
        {"zero_optimization": {"stage": 2, **OFFLOAD}},
        {"zero_optimization": {"stage": 2, **OFFLOAD, "zenflow": ZENFLOW}},
    ),
    "hierarchical_partition": (
        4,
        "fp32",
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}},
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 100,
                "zero_hpz_partition_size": 2,
            }
        },
    ),
}
"""Ranks, precision, DeepSpeed section of the exact run, and what of it the option replaces. The others need GPUs."""
BATCH = 16


def main() -> None:
    """Run every case and print a table of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("eval", type=Path)
    parser.add_argument("--options", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for option in asked.options:
            rounds = []
            for _ in range(asked.rounds):
                exact = run(asked, option, Path(name), is_exact=True)
                rounds.append((exact, run(asked, option, Path(name), is_exact=False)))
            report(option, rounds)


def run(asked: argparse.Namespace, option: str, folder: Path, *, is_exact: bool) -> list[dict[str, float]]:
    """The metrics of each step of one run."""
    ranks, precision, exact, inexact = CASES[option]
    out = Path(tempfile.mkdtemp(dir=folder))
    tree: Tree = {"model": str(asked.model), "output_dir": str(out / "run")}
    columns = {"prompt": "question", "completion": "answer"}
    tree["data"] = {"train": str(asked.train), "eval": str(asked.eval), "columns": columns, "template": "plain"}
    tree["data"]["cache_dir"] = str(folder / "cache")
    tree["train"] = {"for": f"{asked.steps} steps", "global_batch_size": BATCH, "micro_batch_size": BATCH // ranks}
    tree["train"] |= {"max_seq_len": 512, "precision": precision, "activation_checkpointing": "none"}
    tree |= {"optim": {"lr": 1e-3}, "checkpoint": {"every": "never"}, "log": {"trackers": []}}
    tree |= {"export": {"at_end": False}, "eval": {"keep_best": False}}
    tree["deepspeed"] = exact if is_exact else exact | inexact
    tree["inexact"] = [] if is_exact else [option]
    (out / "run.yaml").write_text(json.dumps(tree))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "ds_finetune" / "train.py"), str(out / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def report(option: str, rounds: list[tuple[list[dict[str, float]], list[dict[str, float]]]]) -> None:
    """Print the losses of the first round, and what a step took in all rounds."""
    exact, inexact = rounds[0]
    losses = [[step["train/loss"] for step in steps if "train/loss" in step] for steps in (exact, inexact)]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    say(f"{option}: losses are {apart:.4f} apart at most, the last {abs(losses[0][-1] - losses[1][-1]):.4f}")
    for name, steps, each in zip(("exact", option), (exact, inexact), losses, strict=True):
        chosen = sorted({0, 9, 19, 29, len(each) - 1})
        shown = "  ".join(f"{number + 1}: {each[number]:.4f}" for number in chosen if number < len(each))
        held_out = next(step["eval/loss"] for step in reversed(steps) if "eval/loss" in step)
        sent = [step["comm/total_mib"] for step in steps if "comm/total_mib" in step]
        say(f"  {name}: {shown}  held out: {held_out:.4f}  MiB a step: {statistics.median(sent or [0]):.2f}")
    for index, name in enumerate(("exact", option)):
        medians = [statistics.median(step["perf/step_seconds"] for step in each[index][2:]) for each in rounds]
        say(f"  {name}, seconds of a step by round: {'  '.join(f'{value:.3f}' for value in medians)}")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
