"""Stands in for `python -m ds_finetune train RUN.yaml` in tests of what starts, prunes and resumes runs.

Its loss falls towards (log10(lr) + 3)^2. It writes metrics as a run does, saves and exits with 3 on SIGTERM, resumes
from what it saved, and fails with code 1 where lr is above 1. Above 0.5 its loss is no number.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import yaml

command, run_file = sys.argv[1:3]
run = yaml.safe_load(Path(run_file).read_text())
folder = Path(run["output_dir"])
steps, lr = int(run["train"]["for"].split()[0]), run["optim"]["lr"]
stopped: list[int] = []
signal.signal(signal.SIGTERM, lambda got, _: stopped.append(got))
if lr > 1:
    sys.exit("error: the learning rate is above 1")
saved = folder / "checkpoints" / "step"
first = int(saved.read_text()) if saved.exists() else 0
assert first or not (folder / "metrics.jsonl").exists(), "the folder holds a run"
saved.parent.mkdir(parents=True, exist_ok=True)
with (folder / "metrics.jsonl").open("a") as metrics:
    for step in range(first + 1, steps + 1):
        loss = (math.log10(lr) + 3) ** 2 + run["train"].get("seed", 0) + 1 / step
        shown = None if lr > 0.5 else loss
        metrics.write(json.dumps({"step": step, "train/loss": shown, "eval/loss": shown}) + "\n")
        metrics.flush()
        saved.write_text(str(step))
        if stopped:
            sys.exit(3)
        time.sleep(float(os.environ.get("SECONDS_OF_A_STEP", "0")))
