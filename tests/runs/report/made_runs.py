"""Run folders as the trainer writes them, made up in a moment."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

LAYERS, EXPERTS = (1, 2, 3), 8
CONFIG: dict[str, Any] = {
    "model": {"path": "deepseek-ai/DeepSeek-V2-Lite"},
    "data": {"train": ["openai/gsm8k", "extra/rows.jsonl"]},
    "objective": {"name": "sft"},
    "train": {"for": "60 steps", "global_batch_size": 8, "precision": "bf16"},
    "optim": {"name": "AdamW", "lr": 0.001, "betas": [0.9, 0.95]},
    "output_dir": "runs/a",
}
VERSIONS = {"python": "3.11.7", "ds_finetune": "0.1.0", "torch": "2.13.0"}
START = {"time": 1.79e9, "after_step": 0, "steps": 60, "command": "python train.py a.yaml", "launcher": "torchrun"}
START |= {"ranks": 2, "ranks_per_host": 2, "host": "node1", "device": "CPU", "versions": VERSIONS}
HOSTILE = "</script><script>alert(1)</script><img src=https://example.com/x.png> & {{ 7 * 7 }}"
"""A text of the data that a page must show as text."""


def metric_lines(steps: int, *, every: int = 10) -> list[str]:
    """Lines of metrics.jsonl with an evaluation every so many steps, one skipped step and one straggler."""
    lines = []
    for step in range(1, steps + 1):
        loss = 2 + 4 / step
        record: dict[str, Any] = {
            "step": step,
            "train/loss": loss,
            "train/accuracy": 1 - loss / 7,
            "train/grad_norm": 1.5,
        }
        record |= {"optim/lr": 1e-3 * (1 - step / steps), "perf/tokens_per_second": 1000.0 + step % 7}
        record |= {"perf/step_seconds": 0.25, "memory/peak_gib": 1.5, "perf/mfu": 0.4, "train/skipped_steps": 0}
        record |= {"data/tokens_seen": 250 * step, "perf/straggler_ratio": 1.1}
        if step % every == 0:
            record |= {"eval/loss": loss + 0.25, "eval/accuracy": 0.5, "eval/perplexity": math.exp(loss + 0.25)}
            record |= {"eval/math/loss": loss + 0.5}
        if step == 5:
            record |= {"train/grad_norm": None, "non_finite": ["train/grad_norm"], "notice": "w of layer 3 on rank 1"}
        if step == 7:
            record |= {"slow": "rank 1 (host node1) 2.0x the median"}
        lines.append(json.dumps(record))
    return lines


def make_run(folder: Path, *, steps: int = 60, **config: Any) -> Path:
    """A run folder with everything that a report shows; `config` replaces sections of the run file."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | config, sort_keys=False))
    (folder / "plan.json").write_text(json.dumps({"model": "V2-Lite", "layout": "dp 2, ZeRO-1", "notes": ["a note"]}))
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in metric_lines(steps)))
    starts = [START, START | {"time": START["time"] + 100, "after_step": 20}]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    spans = [["the question ", False], [f"the answer {HOSTILE}", True]]
    data = {"summary": "600 rows", "tokens": 60_000, "counts": [["rows read", "600"]], "mixture": [], "notes": []}
    data |= {"held_out": {"eval": "80 rows"}, "samples": [{"source": "", "title": "", "spans": spans}]}
    (folder / "data.json").write_text(json.dumps(data))
    answers = [
        {"step": step, "name": "eval", "prompt": "1 + 1 =", "answer": f"answer at {step}", "expected": "2"}
        for step in range(10, steps + 1, 10)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    _make_exports(folder, steps)
    _make_experts(folder / "experts.jsonl")
    return folder


def _make_exports(folder: Path, steps: int) -> None:
    for name, step in (("export", steps), ("export-best", steps - 10)):
        (folder / name).mkdir()
        (folder / name / "verification.json").write_text(json.dumps({"step": step}))
    (folder / "export-best" / "UNVERIFIED").write_text("tensor x differs\n")
    results = [
        {"folder": "export", "is_verified": True, "problems": [], "lines": ["47 tensors on the disk"], "skipped": ""}
    ]
    results += [
        {"folder": "export-best", "is_verified": False, "problems": ["tensor x differs"], "lines": [], "skipped": ""}
    ]
    (folder / "exports.json").write_text(json.dumps({"exports": results}))


def _make_experts(path: Path) -> None:
    """Expert 5 of layer 2 has all tokens of its layer from the middle on; the other layers are even."""
    lines = []
    for step in range(1, 41):
        counts = np.full((len(LAYERS), EXPERTS), 10)
        if step > 20:
            counts[1] = 0
            counts[1, 5] = 80
        record = {"step": step, "num_tokens": 40, "layers": LAYERS, "entropy": [1.0] * 3, "counts": counts.tolist()}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
