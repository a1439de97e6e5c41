"""`train` with a fault: FAULT RANK STEP RUN.yaml [section.key=value ...]; the rank does it when it begins that step."""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ds_finetune.cli.main import run_and_exit
from ds_finetune.engine.engine import Engine
from ds_finetune.trainer import prepare

LONG = 1000
SLOW_SECONDS = 0.3
CONTINUED = "TESTS_CONTINUED"
"""In the environment: a file that exists once the ranks were continued."""


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(LONG)


def hold() -> None:
    """Wait in C for a mutex that is never released; PyDLL keeps Python's lock meanwhile, and no signal ends the wait."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def another() -> None:
    """A collective that the others do not take part in."""
    dist.barrier()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(28, "No space left on device")


def mark() -> None:
    """Go on: a test does the fault from outside."""


def slow() -> None:
    time.sleep(SLOW_SECONDS)


def pause() -> None:
    """Wait for the test, which stops both ranks and continues them."""
    while not Path(os.environ[CONTINUED]).exists():
        time.sleep(0.05)


def lose_packets(connection: socket.socket, share: float) -> None:
    """Drop this share of the packets that arrive: a classic BPF program with the kernel's random numbers."""
    random = 0xFFFFF000 + 56
    program = [(0x20, 0, 0, random), (0x35, 1, 0, int(share * 2**32)), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    attach = 26
    connection.setsockopt(socket.SOL_SOCKET, attach, struct.pack("HP", len(program), ctypes.addressof(code)))


def lose(share: float = 0.5) -> None:
    """This share of what arrives at this rank, over any of its connections.

    Not over sockets of this machine: the fork server's, which this process shares, would lose requests of later tests.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                lose_packets(connection, share)


def lose_some() -> None:
    """So few packets that the run goes on, more slowly."""
    lose(0.3)


def main() -> None:
    # `deepspeed` puts its own before them.
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    fault, rank, step = arguments[0], int(arguments[1]), int(arguments[2])
    is_mine = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == rank
    if fault in ("prepare", "full") and is_mine:
        read = prepare.read_inputs
        prepare.read_inputs = lambda *given: (time.sleep(step), fault == "full" and fail(), read(*given))[2]
    elif is_mine:
        _break_step(globals()[fault], step)
    run_and_exit(["train", *arguments[3:]])


def _break_step(fault, step: int) -> None:  # noqa: ANN001
    original, count = Engine.step, 0

    def broken(self: Engine, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        nonlocal count
        count += 1
        if count == step or (count > step and fault is slow):
            sys.stderr.write(f"FAULT {time.time()} {os.getpid()}\n")
            sys.stderr.flush()
            fault()
        return original(self, *args, **kwargs)

    Engine.step = broken


if __name__ == "__main__":
    main()
