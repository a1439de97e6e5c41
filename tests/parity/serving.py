"""What workers share: each runs many cells, one by one, in one world that a test launches (`reference.launch`)."""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.checks import BEFORE_MODEL
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.planning import model_of

Tree = dict[str, Any]


@dataclass(frozen=True)
class Launched:
    """What a worker was launched with: the folder of models, that of results, and its ranks."""

    models: Path
    out: Path
    world: World
    device: str

    @contextmanager
    def engine(self, run_file: RunConfig | Tree) -> Iterator[Engine]:
        """The engine of a run file."""
        config = RunConfig.model_validate(run_file)
        with start_engine(
            make_plan(RunSettings.of(config), world=self.world, device=self.device), model_of(config)
        ) as engine:
            yield engine


def allow_fp16() -> None:
    """Let DeepSpeed and this program compute in fp16 on a CPU, with the loss scale of a GPU: torch's kernels can."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    options = "options of DeepSpeed"
    BEFORE_MODEL[options] = tuple(row for row in BEFORE_MODEL[options] if not row.message.startswith("fp16"))


def serve(run: Callable[[Tree, Launched], tuple[str, object]]) -> None:
    """As a worker, pass the tree of each dataclass to `run`, and write the result to `out` by the name that it gives;
    ends the process.
    """
    models, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, tree in enumerate(given):
            name, found = run(tree, Launched(models, out, world, device))
            if world.rank == 0:
                torch.save(found, out / f"{name}.pt")
            if number == 0:
                # ZeRO-3 collects garbage at each start, which takes 0.7 of 1.7 s of a cell; this excludes everything
                # imported so far.
                gc.freeze()
    exit_process()
