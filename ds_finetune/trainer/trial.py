"""Tries a micro-batch: every rank starts a process of its own, and the ranks agree on how the processes ended."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

import ds_finetune
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import exchange
from ds_finetune.system.process_messages import MessageReader, decode, encode
from ds_finetune.trainer.trial_messages import DONE, ENDED, FAILED, OUT_OF_MEMORY, TrialEnd, TrialRequest
from ds_finetune.world import World

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
"""How long a rank's process may still report its own end once another rank's has failed: a collective may hang then."""
_AGREEMENT = timedelta(minutes=30)
_SHOWN_LINES = 20
_PORTS_TRIED = 3
"""A port is free when it is chosen, and may be taken before the processes meet there, which is rare."""


@dataclass(frozen=True)
class TriedSteps:
    """How the trial of all ranks ended: whether memory sufficed, the largest peak of a rank, the seconds of a step."""

    is_done: bool
    peak_bytes: int
    step_seconds: float
    error: str = ""
    """What the first rank that failed reports; empty where every rank was done."""
    is_out_of_memory: bool = False


def try_steps(config: RunConfig, world: World, store: dist.Store, *, topic: str) -> TriedSteps:
    """Try a few steps of `config` in fresh processes, one on each rank; collective, before there is a process group.

    `topic` names this trial in `store`.
    """
    tree = config.model_dump(mode="json", by_alias=True)
    ends: list[TrialEnd] = []
    for number in range(_PORTS_TRIED):
        place = f"{topic}, port {number}"
        with _TrialProcess(TrialRequest(tree, _trial_world(world, store, place))) as process:
            end = _wait_for_end(process, store, place)
        every = exchange(store, world, f"{place} ends", encode(end).decode(), timeout=_AGREEMENT)
        ends = [decode(text.encode(), [TrialEnd], peer=f"rank {rank}") for rank, text in enumerate(every)]
        if not any(end.is_port_in_use for end in ends):
            break
    return judge(ends)


def judge(ends: Sequence[TrialEnd]) -> TriedSteps:
    """The trial of the ranks that ended so, by rank.

    Memory that ran out on one rank explains what other ranks report; else the first error that is no consequence does.
    """
    peak, seconds = max(end.peak_bytes for end in ends), max(end.step_seconds for end in ends)
    if all(end.outcome == DONE for end in ends):
        return TriedSteps(True, peak, seconds)
    order = {OUT_OF_MEMORY: 0, FAILED: 1, ENDED: 2, DONE: 3}
    ranks = sorted(range(len(ends)), key=lambda rank: (order[ends[rank].outcome], ends[rank].is_secondary, rank))
    first = ends[ranks[0]]
    return TriedSteps(
        False, peak, seconds, f"rank {ranks[0]}: {first.error}", is_out_of_memory=first.outcome == OUT_OF_MEMORY
    )


def _trial_world(world: World, store: dist.Store, topic: str) -> World:
    """The same ranks, at a port of rank zero's host that is free now; another program may take it before they meet."""
    if world.world_size == 1:
        return replace(world, master_addr="127.0.0.1", master_port=0)
    key = f"{topic} is"
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, str(free.getsockname()[1]))
    return replace(world, master_port=int(store.get(key)))


def _wait_for_end(process: "_TrialProcess", store: dist.Store, topic: str) -> TrialEnd:
    """How this rank's process ended; it is ended where another rank's has failed and it does not end by itself."""
    key, failed_at = f"{topic} failed", 0.0
    while (end := process.end()) is None:
        if not failed_at and store.check([key]):
            failed_at = time.monotonic()
        if failed_at and time.monotonic() - failed_at > _GRACE_SECONDS:
            return TrialEnd(ENDED, error="ended, because the trial of another rank had failed")
        time.sleep(_POLL_SECONDS)
    if end.outcome != DONE:
        store.set(key, "")
    return end


class _TrialProcess:
    """The process of this rank's trial, which is killed where it is still running at the end."""

    def __init__(self, request: TrialRequest) -> None:
        self._request = request
        self._token = secrets.token_hex(16)
        self._files = ExitStack()

    def __enter__(self) -> Self:
        # They have no name, so that nothing stays where this process is killed.
        given = self._files.enter_context(tempfile.TemporaryFile())
        self._errors = self._files.enter_context(tempfile.TemporaryFile())
        given.write(encode(self._request))
        given.flush()
        parent, file = str(os.getpid()), f"/proc/{os.getpid()}/fd/{given.fileno()}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds_finetune.trainer.trial_process", parent, file, self._token],
            env=_environment(self._request.world),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self._process.stdout is not None
        self._answers = MessageReader(
            self._process.stdout.fileno(), [TrialEnd], peer="the trial process", token=self._token
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._files.close()

    def end(self) -> TrialEnd | None:
        """How the process ended; None while it runs."""
        message = self._answers.next(0.0)
        if message is not None:
            return message
        if not self._answers.is_closed:
            return None
        return self._end_without_message(self._process.wait())

    def _end_without_message(self, code: int) -> TrialEnd:
        if code == -signal.SIGKILL:
            return TrialEnd(OUT_OF_MEMORY, error="killed by SIGKILL, as the kernel does where the host has no memory")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return TrialEnd(FAILED, error="\n".join([f"exit code {code}", *lines]))


def _environment(world: World) -> dict[str, str]:
    """The variables of this rank, with the address at which the trial processes meet."""
    package = str(Path(ds_finetune.__file__).parents[1])
    given = {
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        # torchrun's ranks meet in the store of its agent (torch 2.13, distributed/rendezvous.py:159), which is taken.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
    }
    return {**os.environ, **given}
