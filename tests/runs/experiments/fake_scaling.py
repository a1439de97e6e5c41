"""Stands in for `python -m ds_finetune train|launch RUN.yaml` in tests of scaling: steps of 1 s over the ranks' root."""

import json
import sys
from pathlib import Path

import yaml

run = yaml.safe_load(Path(sys.argv[2]).read_text())
ranks = int(sys.argv[sys.argv.index("--nproc") + 1]) if "--nproc" in sys.argv else 1
folder, steps = Path(run["output_dir"]), int(run["train"]["for"].split()[0])
if run.get("parallel", {}).get("tp", 1) > 1 and run.get("deepspeed", {}).get("zero_optimization", {}).get("stage") == 2:
    sys.exit("it fails")
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("a") as metrics:
    for step in range(1, steps + 1):
        is_timed = step > 2
        seconds = ranks**-0.5 if is_timed else 100.0
        record = {
            "step": step,
            "train/loss": 2.0 / step + (0.002 if ranks == 2 and step == 3 else 0),
            "perf/step_seconds": seconds,
            "perf/tokens_per_second": 1000 / seconds,
            "memory/peak_gib": 4.0 / ranks,
        }
        metrics.write(json.dumps(record) + "\n")
