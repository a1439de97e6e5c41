"""Train one step on one document of 131,072 tokens: is the memory of a rank what the trace says?

    python bench/long_sequence.py [--tokens 131072] [--ranks 2] [--whole-mlp] [--out RESULT.json]

A small DeepSeek-V3 (hidden 256, 4 layers, latent attention, experts) with 4,096 positions is extended by
`model.context`, and the ranks share the document by `parallel.sp`. Each rank takes one core. Two runs are compared: a
document of 2,048 tokens, whose peak is that of imports, weights and optimizer, and the long one. Printed are the peak
resident memory of the largest rank, in GiB, before and after; the activations that a trace
finds for the tokens of a rank; and the seconds of the step. The stated limit is the short run's peak plus 1.25
times the traced activations; the exit code is 1 where the long run needs more.

Attention is quadratic: 131,072 tokens are 2.0e13 operations, five minutes of one core at 65 GFLOP/s, which heads of 16
columns reach.
"""

import argparse
import json
import os
import random
import resource
import string
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ds_finetune.cli.demo import MODEL, write_demo
from ds_finetune.cli.plan import planned_traces
from ds_finetune.config.schema import read_config
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World

ROOT = Path(__file__).parents[1]
SHORT = 2048
SLACK = 1.25
"""Above the computed activations: buffers of exchanges and of kernels, and what the allocator does not return."""
SMALL_V3: Mapping[str, Any] = {
    **MODEL,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}
GIB = 2**30
ENVIRON = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # glibc keeps freed pieces of up to 32 MiB otherwise, and what is measured is the allocator.
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**20),
}


def write_run(folder: Path, *, tokens: int, ranks: int, is_tiled: bool) -> Path:
    """A run of one step on one row, which is one document of `tokens` tokens; returns the run file."""
    write_demo(folder)
    (folder / "model" / "config.json").write_text(json.dumps(SMALL_V3))
    # A token for each character.
    text = "".join(random.Random(0).choices(string.ascii_lowercase + " ", k=tokens))
    (folder / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    tree = {
        "model": {"path": str(folder / "model"), "weights": "random", "context": max(tokens, SHORT)},
        "data": {"train": str(folder / "train.jsonl"), "shuffle": False, "cache_dir": str(folder / "cache")},
        "objective": "pretrain",
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "train": {
            "for": "1 steps",
            "global_batch_size": 1,
            "micro_batch_size": 1,
            "max_seq_len": tokens,
            "precision": "fp32",
            "tiled_mlp": is_tiled,
        },
        "parallel": {"sp": ranks},
        "checkpoint": {"every": "never"},
        "export": {"at_end": False},
        "log": {"trackers": []},
        "output_dir": str(folder / "run"),
    }
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(tree))
    return run_file


def measure(*, tokens: int, ranks: int, is_tiled: bool) -> dict[str, Any]:
    """The step's record and the peak resident memory of the rank that had most, in bytes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = os.environ | ENVIRON
    with tempfile.TemporaryDirectory() as name:
        run_file = write_run(Path(name), tokens=tokens, ranks=ranks, is_tiled=is_tiled)
        subprocess.run([*launcher, "ds_finetune/train.py", str(run_file)], cwd=ROOT, env=environ, check=True)
        (record,) = map(json.loads, (Path(name) / "run" / "metrics.jsonl").read_text().splitlines())
    # The largest of all children so far, in KiB; the short run comes first.
    return record | {"peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}


def traced(*, tokens: int, ranks: int, is_tiled: bool) -> int:
    """Bytes of the activations of a rank at most, by a trace."""
    with tempfile.TemporaryDirectory() as name:
        run = RunSettings.of(read_config(write_run(Path(name), tokens=tokens, ranks=ranks, is_tiled=is_tiled)))
        plan = make_plan(run, world=World(0, ranks, 0, ranks, "a trace"), device="cpu")
        return planned_traces(run, print)(plan).peak


def main() -> int:
    """Measure both runs, print them beside the trace, and return 1 where the long one needs more than stated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--whole-mlp", action="store_true", help="do not compute MLPs in tiles")
    parser.add_argument("--out", type=Path, help="file for the numbers as JSON")
    given = parser.parse_args()
    is_tiled = not given.whole_mlp
    planned = traced(tokens=given.tokens, ranks=given.ranks, is_tiled=is_tiled)
    short = measure(tokens=SHORT, ranks=given.ranks, is_tiled=is_tiled)
    long = measure(tokens=given.tokens, ranks=given.ranks, is_tiled=is_tiled)
    assert long["data/tokens_seen"] == given.tokens, long
    limit = short["peak_bytes"] + SLACK * planned
    result = {
        "tokens": given.tokens,
        "ranks": given.ranks,
        "is_tiled": is_tiled,
        "short_peak_gib": short["peak_bytes"] / GIB,
        "planned_activations_gib": planned / GIB,
        "stated_limit_gib": limit / GIB,
        "long_peak_gib": long["peak_bytes"] / GIB,
        "measured_activations_gib": (long["peak_bytes"] - short["peak_bytes"]) / GIB,
        "step_seconds": long["perf/step_seconds"],
        "loss": long["train/loss"],
    }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if given.out is not None:
        given.out.write_text(text + "\n")
    return int(long["peak_bytes"] > limit)


if __name__ == "__main__":
    sys.exit(main())
