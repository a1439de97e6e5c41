"""One rank of a launched run: `python -m ds_finetune.cluster.worker RUN.yaml ...`, under any launcher.

Under mpirun and Slurm this module redirects the output of all ranks but rank 0 to files. Under torch's agent, the agent
redirects the output of all ranks.
"""

import os
import sys
from contextlib import suppress
from typing import NoReturn

from ds_finetune.cli import main as cli
from ds_finetune.config.schema import read_config
from ds_finetune.errors import FinetuneError
from ds_finetune.system.processes import die_with_parent
from ds_finetune.system.rank_files import RUN_ID, log_name, logs_folder
from ds_finetune.system.world import World

_LINGER_SECONDS = 5.0
"""Seconds that a rank without output on the terminal waits after a mistake of the user. srun and mpirun end all ranks
when the first one ends, and rank 0 must have printed the mistake by then.
"""


def main() -> NoReturn:
    """Train as one rank, with the run file and overrides in the arguments of this process."""
    parent, linger = os.getppid(), 0.0
    die_with_parent()
    if os.getppid() != parent:
        # The parent process ended before `die_with_parent` took effect, so this process ends now.
        os._exit(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # From here on, errors go to the log of this rank; before, they went to the log of torch's agent.
        os.dup2(1, 2)
    elif (rank := World.from_environment(os.environ).rank) and RUN_ID in os.environ:
        linger = _LINGER_SECONDS
        # An invalid run file redirects nothing: the training reports the error.
        with suppress(FinetuneError, IndexError):
            folder = logs_folder(read_config(sys.argv[1], sys.argv[2:]).output_dir, os.environ[RUN_ID])
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
    cli.run_and_exit(["train", *sys.argv[1:]], linger=linger)


if __name__ == "__main__":
    main()
