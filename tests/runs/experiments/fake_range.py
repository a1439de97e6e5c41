"""Stands in for `python -m ds_finetune train RUN.yaml` in tests of range tests: its loss depends on the rate alone."""

import json
import math
import sys
import time
from pathlib import Path

import yaml

from ds_finetune.config.schedule import LrSchedule

run = yaml.safe_load(Path(sys.argv[2]).read_text())
folder, optim, steps = Path(run["output_dir"]), run["optim"], int(run["train"]["for"].split()[0])
if not optim["weight_decay"]:
    sys.exit("no weight decay")
if optim["weight_decay"] == 0.5:
    sys.stderr.write("no such model")
    sys.exit(2)
schedule = LrSchedule(
    name=optim["lr_scheduler"], lr=optim["lr"], min_lr_ratio=optim["min_lr_ratio"], warmup_steps=0, steps=steps
)
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("a") as metrics:
    for step in range(1, steps + 1):
        lr = schedule.at(step)
        distance = math.log10(lr) + 2
        loss = 1 + (1 - math.exp(-((min(distance, 0) / 1.5) ** 2))) * 3 + max(distance, 0) ** 4 * 10
        metrics.write(json.dumps({"step": step, "train/loss": loss, "optim/lr": lr}) + "\n")
        metrics.flush()
        time.sleep(0.02)
time.sleep(1)
