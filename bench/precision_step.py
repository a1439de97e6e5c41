"""A training step in bf16 beside the same step in fp32, on CPUs:
`python bench/precision_step.py MODEL ROWS.jsonl [--hidden 256]`.

MODEL is a folder with a tokenizer; the model is a DeepSeek-V3 of four layers and 16 experts with random weights and the
tokenizer's vocabulary. ROWS has `question` and `answer`, packed to 2,048 tokens, two rows a step, ZeRO-1. One process
for each precision; they run the same steps by turns, each with one thread, and CPU time is measured. The first step of
each is not counted.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

PRECISIONS = ("fp32", "bf16")
LAYERS = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS |= {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
LAYERS |= {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
LAYERS |= {"max_position_embeddings": 4096}


def main() -> None:
    """Start both processes, let them take steps by turns, and print the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_steps(Path(arguments.serve), arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, Path(folder))


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Print each step of each precision, and how many times as fast bf16 is."""
    seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    running = {}
    for precision in PRECISIONS:
        run_file = write_run(arguments, folder / precision, precision)
        command = [sys.executable, __file__, str(arguments.model), str(arguments.rows)]
        command += ["--steps", str(arguments.steps), "--serve", str(run_file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        running[precision] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    for number in range(arguments.steps):
        for precision, process in running.items():
            step = ask_for_step(process)
            sys.stdout.write(f"{precision} step {number}: {json.dumps(step)}\n")
            sys.stdout.flush()
            if number:
                seconds[precision].append(step["seconds"])
    for process in running.values():
        process.kill()
        process.wait()
    medians = {precision: statistics.median(found) for precision, found in seconds.items()}
    sys.stdout.write(f"bf16 is {medians['fp32'] / medians['bf16']:.2f} times as fast as fp32: {medians}\n")


def ask_for_step(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next step of a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("step\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("{"):
            step: dict[str, Any] = json.loads(line)
            return step
    raise SystemExit(f"a process ended with {process.wait()}")


def write_run(arguments: argparse.Namespace, folder: Path, precision: str) -> Path:
    """The model's configuration and tokenizer, and a run file."""
    from transformers import AutoTokenizer

    from ds_finetune.cli.demo import MODEL

    shutil.copytree(arguments.model, folder / "model")
    hidden = arguments.hidden
    vocabulary = -(-len(AutoTokenizer.from_pretrained(folder / "model")) // 1024) * 1024
    widths = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "moe_intermediate_size": hidden // 2}
    config = MODEL | LAYERS | widths | {"vocab_size": vocabulary}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    train = {"for": f"{arguments.steps} steps", "global_batch_size": 2, "micro_batch_size": 2, "max_seq_len": 2048}
    run = {
        "model": {"path": str(folder / "model"), "weights": "random"},
        "data": {
            "train": str(arguments.rows.resolve()),
            "columns": {"prompt": "question", "completion": "answer"},
            "template": "plain",
            "packing": True,
            "cache_dir": str(folder / "cache"),
        },
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "train": train | {"precision": precision, "activation_checkpointing": "none"},
        "output_dir": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def serve_steps(run_file: Path, steps: int) -> None:
    """Take one optimizer step for each line that is read, and print its CPU seconds, loss and supervised tokens."""
    from ds_finetune.config.schema import read_config
    from ds_finetune.engine.devices import choose_device
    from ds_finetune.engine.groups.default_group import process_group
    from ds_finetune.engine.start_engine import start_engine
    from ds_finetune.system.world import World
    from ds_finetune.trainer.batches import run_batches
    from ds_finetune.trainer.prepare import read_run
    from ds_finetune.trainer.resolve import resolve

    config, world = read_config(run_file), World.from_environment(os.environ)
    world.set_environment(os.environ)
    run = read_run(resolve(config, world=world, device=choose_device()))
    with process_group(world, run.plan.device), start_engine(run.plan, run.inputs.model) as engine:
        for batch in islice(run_batches(run), steps):
            sys.stdin.readline()
            began = time.process_time()
            step = engine.step(batch, lr=1e-4)
            found = {"seconds": round(time.process_time() - began, 2), "loss": step.metrics["loss"]}
            sys.stdout.write(json.dumps(found | {"supervised_tokens": step.num_supervised_tokens}) + "\n")
            sys.stdout.flush()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
