"""One rank of a launched run: `python -m ds_finetune.rank RUN.yaml ...`, under any launcher.

What it prints goes to its guard where there is one, else to a file of its own; the guard is told of its end with the exit code, and ends
what does not end.
"""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from ds_finetune import cli
from ds_finetune.launch.lines import packed
from ds_finetune.launch.marks import GUARD, LOGS, die_with_parent, log_name
from ds_finetune.world import World


def main() -> NoReturn:
    """Train with the arguments of this process."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os._exit(1)
    world = World.from_environment(os.environ)
    guard = os.environ.get(GUARD)
    if guard:
        _print_to(_connected(guard, said="output", rank=world.rank).detach())
        # Kept from programs that this one starts, so that its end is this process's end.
        control = _connected(guard, said="rank", rank=world.rank, pid=os.getpid())
    elif LOGS in os.environ:
        folder = Path(os.environ[LOGS])
        folder.mkdir(parents=True, exist_ok=True)
        _print_to(os.open(folder / log_name(world.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    try:
        code = cli.main(["train", *sys.argv[1:]])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if guard:
        control.sendall(packed(said="ended", rank=world.rank, code=code))
    cli.leave(code)


def _connected(guard: str, **first: object) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{guard}")
    connection.sendall(packed(**first))
    return connection


def _print_to(file: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
