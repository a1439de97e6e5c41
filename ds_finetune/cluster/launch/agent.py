"""torch's elastic agent of one host, which starts, watches and restarts the ranks of that host.

This agent extends torch's (2.13, elastic/agent/server): it numbers ranks in the order of the hostfile, agrees with the
agents of other hosts on restarts, ends its ranks when those of another host have failed, and reports failures.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ds_finetune.cluster.host_program import HostProgram, kill_children
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from ds_finetune.system.info import interface_towards
from ds_finetune.system.processes import oom_kills
from ds_finetune.system.rank_files import ERROR_FILE, log_name

_GRACE_SECONDS = 4.0
"""Seconds from the first failure of a rank until the other ranks of its host are killed, after they wrote reports."""
_DONE_SECONDS = 60.0
"""Seconds that an agent whose ranks are done waits for the agents of other hosts, whose ranks may fail and restart."""
_TAIL_LINES, _TAIL_BYTES = 50, 20_000
Event = dict[str, Any]


class RankLogs(LogsSpecs):
    """Chooses a log file and an error file for each rank of the host. The output of rank 0 is also printed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder, self.attempt = folder, 0

    @property
    def root_log_dir(self) -> str:
        """The folder with the logs of all attempts, which are the start of the run and its restarts."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose paths of log and error files by local rank, and tell each rank its error file in its environment."""
        folder = self.folder / f"attempt-{self.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        logs = {local: str(folder / log_name(int(env["RANK"]))) for local, env in envs.items()}
        errors = {local: log.replace(".log", ".json") for local, log in logs.items()}
        for local, env in envs.items():
            env[ERROR_FILE] = errors[local]
            Path(errors[local]).unlink(missing_ok=True)
        shown = {local: logs[local] for local, env in envs.items() if env["RANK"] == "0"}
        return LogsDest(logs, dict.fromkeys(envs, ""), shown, {}, errors)


class HostAgent(LocalElasticAgent):
    """The elastic agent of this host. `emit` sends an event to the program `ds-finetune launch`."""

    def __init__(
        self, logs: Path, rendezvous: Mapping[str, Any], workers: Mapping[str, Any], emit: Callable[[Event], None]
    ) -> None:
        self._name, self._emit = rendezvous["local_addr"], emit
        self._logs = RankLogs(logs)
        self._members = frozenset[str]()
        self._lost = set[str]()
        self._is_saving = False
        self._pids: list[int] = []
        self._oom_kills = 0
        handler = get_rendezvous_handler(RendezvousParameters(backend="c10d", **rendezvous))
        spec = WorkerSpec(role="", rdzv_handler=handler, monitor_interval=0.2, **workers)
        # torch prints the role of the ranks as a prefix of their output. The role is empty, so the output of rank 0 has
        # no prefix.
        super().__init__(spec, self._logs, exit_barrier_timeout=_DONE_SECONDS, log_line_prefix_template="${role_name}")

    def save(self) -> None:
        """Ask the ranks of this host to save a checkpoint and end. They are not restarted."""
        self._is_saving, self._remaining_restarts = True, 0
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def lose(self, name: str) -> None:
        """Record that the host of the agent `name` is gone, so that the ranks of this host restart without it."""
        self._lost.add(name)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        # The agents' numbers may differ, so all take the highest attempt number and the fewest remaining restarts.
        store.set(f"agents/{group_rank}", f"{self._name} {self._remaining_restarts} {self._logs.attempt + 1}")
        agents = [store.get(f"agents/{number}").decode().split() for number in range(group_world_size)]
        self._members = frozenset(name for name, _, _ in agents)
        self._remaining_restarts = min(int(restarts) for _, restarts, _ in agents)
        self._logs.attempt = max(int(attempt) for _, _, attempt in agents)
        workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._oom_kills = oom_kills()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = list(pids.values())
        assert self._pcontext is not None
        self._pcontext.close = partial(self._end_ranks, self._pcontext.close)  # type: ignore[method-assign]
        restart = worker_group.spec.max_restarts - self._remaining_restarts
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        ranks = [worker.global_rank for worker in worker_group.workers]
        started = {"started": self._logs.attempt, "members": sorted(self._members), "ranks": ranks}
        self._emit({**started, "restart": restart, "interface": interface})
        return pids

    def _end_ranks(self, close: Callable[..., None], *_: object, **__: object) -> None:
        """End the ranks of this host within seconds, or, after an order to save, once they have saved. torch itself
        would wait 30 s after SIGTERM, also for ranks that hang.
        """
        # torch's `close` sends a signal, waits, and kills ranks that still run. SIGCONT does nothing to a running rank,
        # so each rank may end by itself within the waiting time.
        close(signal.SIGCONT, float("inf") if self._is_saving else _GRACE_SECONDS)
        kill_children()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and self._is_group_failed(worker_group):
            return RunResult(state=WorkerState.UNHEALTHY)
        if result.state is WorkerState.FAILED:
            assert worker_group.store is not None
            rank, first = min(result.failures.items(), key=lambda item: _time_of(item[1]))
            # In the first attempt the exit code of a user's mistake is final, because a restart would repeat the
            # mistake. In a later attempt that code means a problem of the host, e.g. a full disk.
            is_final = first.exitcode == INTERRUPTED_EXIT_CODE or (
                first.exitcode == USER_ERROR_EXIT_CODE and self._logs.attempt == 1
            )
            if is_final:
                self._remaining_restarts = 0
            worker_group.store.set("failed", "again" if self._remaining_restarts else "for good")
            self._emit(self._described(rank, first))
        return result

    def _is_group_failed(self, worker_group: WorkerGroup) -> bool:
        assert worker_group.store is not None
        if not worker_group.store.check(["failed"]):
            return bool(self._lost & self._members)
        if worker_group.store.get("failed") == b"for good":
            self._remaining_restarts = 0
        return True

    def _described(self, rank: int, failure: ProcessFailure) -> Event:
        code, message = failure.exitcode, failure.error_file_data["message"]
        text = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        # For a rank that wrote no error file, torch's message is a text instead of a mapping.
        recorded = {"message": "", "cause": ""} | (message if isinstance(message, dict) else {})
        if code < 0 and not recorded["message"] and (count := oom_kills() - self._oom_kills) > 0:
            text += f": meanwhile the kernel killed {count} processes of the host for lack of memory"
        return {
            "rank": rank,
            "code": 128 - code if code < 0 else code,
            "text": text,
            "cause": recorded["cause"],
            "error": "" if recorded["message"] == recorded["cause"] else recorded["message"],
            "tail": _last_lines(self._logs.folder / f"attempt-{self._logs.attempt}" / log_name(rank)),
            "age": max(0.0, time.time() - _time_of(failure)),
        }


def _time_of(failure: ProcessFailure) -> float:
    # The rank's error file has the exact time; `timestamp` is when the agent noticed the failure.
    message = failure.error_file_data["message"]
    at = message.get("at") if isinstance(message, Mapping) else None
    return float(at or failure.timestamp)


def _last_lines(log: Path) -> list[str]:
    with suppress(OSError), log.open("rb") as file:
        file.seek(-min(_TAIL_BYTES, log.stat().st_size), os.SEEK_END)
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return []


def run_ranks(
    program: HostProgram, *, logs: str, environ: Mapping[str, str], rendezvous: dict[str, Any], workers: dict[str, Any]
) -> bool | str:
    """Run the ranks of this host, with restarts, until they end for good. Returns whether they succeeded, or a text
    that says why the agents of the hosts could not connect.

    `environ` has environment variables for the ranks of this host only. `rendezvous` has arguments of torch's
    RendezvousParameters; its `local_addr` is the agent's name, and torch numbers agents alphabetically by name.
    `workers` has arguments of torch's WorkerSpec, with the address of the first host as `master_addr`.
    """
    folder = Path(logs)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"agent-{socket.gethostname()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stderr.flush()
    os.dup2(log, 2)
    os.environ.update(environ)
    # Without this variable, torch 2.13 would give a restart the port and the store keys of an earlier attempt.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if rendezvous["max_nodes"] > 1 and (interface := interface_towards(workers["master_addr"])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    try:
        # The agent prints the output of rank 0, which must go to the launching program.
        with redirect_stdout(program.output):
            agent = HostAgent(folder, rendezvous, workers, program.emit)
            program.orders.update(save=agent.save, lose=agent.lose)
            result = agent.run()
    except RendezvousError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        kill_children()
    return result is not None and result.state is WorkerState.SUCCEEDED
