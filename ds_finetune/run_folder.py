"""The run directory: checked before anything is loaded, then the resolved configuration and the plan are written into it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ds_finetune.config import RunConfig, dump_config
from ds_finetune.errors import OutputError
from ds_finetune.plan.layout import Plan

_BYTES_PER_PARAMETER = {"bf16": 2, "fp16": 2, "fp32": 4}
_GIB = 2**30


def check_output(config: RunConfig, total_params: int | None) -> None:
    """OutputError where `output_dir` cannot be written, is a file, or its disk is too small for the exports; leaves nothing behind."""
    folder = Path(config.output_dir)
    existing = _nearest_existing(folder)
    if (folder / "metrics.jsonl").exists():
        raise OutputError(f"output_dir `{folder}` already holds a run (metrics.jsonl)", hint="name another output_dir, or move that run away")
    if not existing.is_dir():
        raise OutputError(f"output_dir `{folder}` lies below `{existing}`, which is not a folder", hint="name another output_dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"output_dir `{folder}`: no permission to write in `{existing}`", hint="change the permissions or name another output_dir")
    if total_params is None:
        return
    folders = config.export.at_end + (config.eval.keep_best and bool(config.data.eval))
    needed = folders * total_params * _BYTES_PER_PARAMETER[config.train.precision]
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise OutputError(
            f"output_dir `{folder}`: {folders} export(s) need {needed / _GIB:.2f} GiB and the disk has {free / _GIB:.2f} GiB free",
            hint="free some space, name another output_dir, or set eval.keep_best false",
        )


def write_run_files(plan: Plan) -> Path:
    """The run folder; rank zero creates it with `config.yaml` (alone enough to run again), `plan.json` and `deepspeed.json`."""
    folder = Path(plan.config.output_dir)
    if plan.world.rank:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(plan.config), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps({**dict(plan.lines()), "notes": plan.notes}, indent=2) + "\n", encoding="utf-8")
    (folder / "deepspeed.json").write_text(json.dumps(plan.deepspeed, indent=2) + "\n", encoding="utf-8")
    return folder


def _nearest_existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the run or the model."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree
