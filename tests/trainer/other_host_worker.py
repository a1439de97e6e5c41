"""Ranks of which the second is as on another host: `versions FOLDER RUN` trains `RUN` where `FOLDER`, with metadata of
packages, comes first on rank 1; `kernels FOLDER` chooses kernels for a GPU where rank 1 finds no compiler. Prints each
rank's exit code.
"""

import os
import sys
from pathlib import Path

from ds_finetune.cli.main import main
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.kernels import choose_kernels
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import check_same_kernels
from ds_finetune.trainer.train import start_watchdog


def _train(folder: str, run_file: str) -> int:
    if world.rank == 1:
        sys.path.insert(0, folder)
    return main(["train", run_file])


def _choose(output_dir: str) -> int:
    if world.rank == 1:
        os.environ["PATH"] = ""
    kernels = choose_kernels("auto", device="cuda", stage=2)
    try:
        with start_watchdog(WatchdogConfig(), world, Path(output_dir), print) as (_, ranks):
            check_same_kernels(kernels, "cuda", ranks)
    except ConfigError as error:
        sys.stderr.write(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    world = World.from_environment(os.environ)
    code = {"versions": _train, "kernels": _choose}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(f"rank {world.rank}: exit code {code}\n")
    sys.stdout.flush()
