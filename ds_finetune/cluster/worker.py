"""One rank of a launched run: `python -m ds_finetune.cluster.worker RUN.yaml ...`, under any launcher.

Under a supervisor (cluster/launch/supervisor.py) the rank sends it its output and its exit code, and the supervisor
kills a rank that does not end. Under mpirun and Slurm the output of ranks other than the first goes to files.
"""

import os
import socket
import sys
from typing import NoReturn

from ds_finetune.cli import main as cli
from ds_finetune.cluster.launch.messages import RankConnected, RankExit, RankOutput
from ds_finetune.cluster.launch.process_tags import RUN_ID, SUPERVISOR_VARIABLE, die_with_parent, log_name, logs_folder
from ds_finetune.config.schema import read_config
from ds_finetune.errors import FinetuneError
from ds_finetune.system.process_messages import ProcessMessage, encode
from ds_finetune.system.world import World


def main() -> NoReturn:
    """Train with the arguments of this process."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        # The parent ended before `die_with_parent` took effect.
        os._exit(1)
    world = World.from_environment(os.environ)
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor:
        _redirect_output(_connect(supervisor, RankOutput(world.rank)).detach())
        # Child processes do not inherit this connection: it closes when this process ends.
        control = _connect(supervisor, RankConnected(world.rank, os.getpid()))
    elif world.rank and RUN_ID in os.environ:
        _redirect_output_to_file(world.rank, os.environ[RUN_ID])
    try:
        code = cli.main(["train", *sys.argv[1:]])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if supervisor:
        control.sendall(encode(RankExit(code)))
    cli.exit_process(code)


def _connect(supervisor: str, first: ProcessMessage) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{supervisor}")
    connection.sendall(encode(first))
    return connection


def _redirect_output_to_file(rank: int, run_id: str) -> None:
    """Redirect the output of a rank other than 0, because mpirun and srun show the output of all ranks.

    An invalid run file is left to the training to report."""
    try:
        folder = logs_folder(read_config(sys.argv[1], sys.argv[2:]).output_dir, run_id)
    except (FinetuneError, IndexError):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _redirect_output(os.open(folder / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def _redirect_output(file: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
