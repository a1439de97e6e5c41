"""One rank of a launched run: `python -m ds_finetune.worker RUN.yaml ...`, under any launcher.

What it prints goes to its guard where there is one, which is told of its end with the exit code, and ends what does
not end. Under mpirun and Slurm what ranks other than the first print goes to files.
"""

import os
import socket
import sys
from typing import NoReturn

from ds_finetune.cli import main as cli
from ds_finetune.config.schema import read_config
from ds_finetune.errors import FinetuneError
from ds_finetune.launch.messages import packed
from ds_finetune.launch.process_tags import RUN_ID, SUPERVISOR_VARIABLE, die_with_parent, log_name, logs_folder
from ds_finetune.world import World


def main() -> NoReturn:
    """Train with the arguments of this process."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os._exit(1)
    world = World.from_environment(os.environ)
    guard = os.environ.get(SUPERVISOR_VARIABLE)
    if guard:
        _print_to(_connected(guard, said="output", rank=world.rank).detach())
        # Kept from programs that this one starts, so that its end is this process's end.
        control = _connected(guard, said="rank", rank=world.rank, pid=os.getpid())
    elif world.rank and RUN_ID in os.environ:
        _print_to_file(world.rank, os.environ[RUN_ID])
    try:
        code = cli.main(["train", *sys.argv[1:]])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if guard:
        control.sendall(packed(said="ended", rank=world.rank, code=code))
    cli.exit_process(code)


def _connected(guard: str, **first: object) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{guard}")
    connection.sendall(packed(**first))
    return connection


def _print_to_file(rank: int, run_id: str) -> None:
    """What rank 0 prints is what mpirun and srun show; a run file that is wrong is said by the training itself."""
    try:
        folder = logs_folder(read_config(sys.argv[1], sys.argv[2:]).output_dir, run_id)
    except (FinetuneError, IndexError):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _print_to(os.open(folder / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def _print_to(file: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
