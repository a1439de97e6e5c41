"""`ds-finetune launch`: starts torch's elastic agent on each host, and reports how the run ended."""

import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.cluster.host_checks import (
    Check,
    describe,
    label,
    meeting_address,
    port_check,
    rank_device,
    world_of,
)
from ds_finetune.cluster.hosts import Cluster, Event, Reply
from ds_finetune.cluster.launch.commands import Job, table
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.config.sections import CheckpointConfig, LaunchConfig
from ds_finetune.config.units import spans_text
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import (
    INTERRUPTED_EXIT_CODE,
    RUN_ERROR_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    ConfigError,
    LaunchError,
)
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.processes import handle_signals
from ds_finetune.system.rank_files import RUN_ID, log_name, logs_folder

SAVE_NOTICE = "asked the ranks to save and stop; signal again to kill them"
KILL_NOTICE = "killing every rank"
_TICK_SECONDS = 0.25
"""Seconds between two keep-alive messages to the hosts, and between two readings of their reports."""
_ENDING_SECONDS = 8.0
"""Seconds that the other agents may take to end and report, after one agent has failed and does not restart its ranks.
"""
_LOAD_SECONDS = 120.0
"""Seconds that a host may take to import torch."""
_MEET_SECONDS = 600
"""Seconds that the agents of all hosts wait for each other at a start or restart."""
_JOIN_SECONDS = 10
"""Seconds that a restart waits for further hosts once launch.min_hosts have joined: they may be ending their ranks."""
_PRINTED_LINES = 500
_TAIL_LINES = 50
_QUOTED = "  | "


@dataclass(frozen=True)
class LaunchRequest:
    """A run to launch: the job, settings of the run file, and how to reach the hosts."""

    job: Job
    settings: RunSettings
    launch: LaunchConfig
    output_dir: str
    remote: Remote
    port: int = 0
    """The agents of all hosts meet at this port of the first host. With 0 a free port is chosen."""

    @property
    def logs(self) -> Path:
        """Folder of the logs of the run's ranks, on each host."""
        return logs_folder(self.output_dir, self.job.run_id)


def launch(request: LaunchRequest, say: Say) -> int:
    """Run `request` until it is done, has failed for good or has saved after a signal; returns the exit code.

    Exit code 0 means that the run is done, and 3 that it has saved after a signal. Otherwise it is the exit code of the
    first failed rank (2 for a mistake of the user), or 128 + N if signal N killed that rank or made this function kill
    all ranks. LaunchError or ConfigError if hosts or settings are not ready, before any rank starts.
    """
    _check_restartable(request.launch, request.settings.checkpoint)
    say(f"run {request.job.run_id}: logs in {request.logs} on each host")
    with closing(_LaunchedRun(request, say)) as run:
        run.start()
        with handle_signals(run.signal):
            return run.finish()


def _check_restartable(settings: LaunchConfig, checkpoint: CheckpointConfig) -> None:
    if settings.restarts and checkpoint.resume == "never":
        raise ConfigError(
            f"launch.restarts is {settings.restarts}, but checkpoint.resume is never: a restart would not resume from "
            "the checkpoints of this run",
            hint="leave checkpoint.resume out, and give the run its own output_dir",
        )
    if settings.restarts and not checkpoint.saves:
        raise ConfigError(
            f"launch.restarts is {settings.restarts}, but checkpoint.every is `{checkpoint.every}`: a restart needs a "
            "checkpoint",
            hint="set checkpoint.every to e.g. `500 steps`",
        )
    if settings.min_hosts is not None and checkpoint.node_local:
        raise ConfigError(
            f"launch.min_hosts is {settings.min_hosts}, but checkpoint.node_local is true: without a lost host, its "
            "part of each checkpoint is missing",
            hint="save to a shared folder (checkpoint.node_local false), or leave launch.min_hosts out",
        )


def check_plan(settings: RunSettings, hosts: Sequence[Host], device: str) -> None:
    """Raise ConfigError if the parallel layout or the batch of the run does not fit the number of ranks of `hosts`.
    `device` is `cpu` or `cuda`.
    """
    make_plan(settings, world=world_of(hosts, "launch"), device=device)


def check_hosts(checks: Sequence[tuple[Host, Check]], num_hosts: int, say: Say) -> None:
    """Raise LaunchError with a line for each failed check of a host; if none has failed, `say` prints the warnings."""
    if failed := [(host, describe(host, check)) for host, check in checks if check.state == "fail"]:
        faults, num_faulty = "\n  ".join(text for _, text in failed), len(dict(failed))
        raise LaunchError(
            f"{num_faulty} of {num_hosts} hosts are not ready, nothing was started:\n  {faults}",
            hint="examine the hosts with `ds-finetune doctor --hostfile HOSTS`, or leave hosts out with --exclude",
        )
    for host, check in checks:
        say(f"warning: {describe(host, check)}")


def largest_fit(request: LaunchRequest, fit: Sequence[Host], *, device: str) -> tuple[Host, ...]:
    """The first hosts of `fit`, as many as the run's parallel layout and global batch allow. Empty if fewer than
    launch.min_hosts remain (default: all hosts of the job).
    """
    fewest = request.launch.min_hosts or len(request.job.hosts)
    for number in range(len(fit), fewest - 1, -1):
        try:
            check_plan(request.settings, fit[:number], device)
        except ConfigError:
            continue
        return tuple(fit[:number])
    return ()


@dataclass(frozen=True)
class _Failure:
    """The first failure on a host: of one of its ranks, or of the host itself (`rank` is None)."""

    host: Host
    rank: int | None
    text: str
    code: int
    """The exit code of the whole run if this failure was the first one."""
    at: float
    """Time of the failure by the monotonic clock of this machine."""
    cause: str = ""
    """Why the run ended, if another rank caused the end of this rank."""
    error: str = ""
    tail: Sequence[str] = ()
    """Last lines that the rank or the program on the host printed."""


class _LaunchedRun:
    """The state of a running launch: reports of the agents on hosts, lost hosts, and received signals."""

    def __init__(self, request: LaunchRequest, say: Say) -> None:
        self._request, self._say, self._settings, self._hosts = request, say, request.launch, request.job.hosts
        self._cluster = Cluster(self._hosts, request.remote, name=request.job.run_id)
        self._agents: dict[Host, Future[Reply | str]] = {}
        """The reply of the agent on each host, which comes when the agent ends. Lost hosts are removed."""
        self._ends: dict[Host, bool | str] = {}
        """The reply of each agent that has ended: whether its ranks succeeded, or why the agents could not connect."""
        self._events = queue.SimpleQueue[tuple[Host, Event]]()
        self._failures: list[_Failure] = []
        self._printed = deque[str](maxlen=_PRINTED_LINES)
        self._signals: list[int] = []
        self._num_passed_on = 0
        self._attempt, self._started, self._began = 0, dict[Host, Mapping[str, Any]](), time.monotonic()
        self._failed_since: float | None = None
        self._ending_since: float | None = None
        self._is_failure_printed = False
        self._is_killed = False
        self._device = self._address = ""
        self._port = 0

    def start(self) -> None:
        """Check every host and start its agent. LaunchError or ConfigError if a host is not ready."""
        request, cluster, first = self._request, self._cluster, self._hosts[0]
        infos = cluster.infos(request.job.variables, request.port, seconds=self._settings.greeting_seconds)
        check_hosts(cluster.preflight(infos, request.job.variables), len(self._hosts), self._say)
        facts = {host: infos[label(host)] for host in self._hosts}
        self._device = rank_device(infos, request.job.variables)
        check_plan(request.settings, self._hosts, self._device)
        self._address = meeting_address(self._hosts, facts)
        if not self._address:
            raise LaunchError(
                f"the first host {first.target} has no address that the {len(self._hosts) - 1} other hosts reach: "
                f"its network interfaces are {', '.join(facts[first].interfaces)}",
                hint=f"write an address of {first.target} that the other hosts can reach into the hostfile",
            )
        port = port_check(label(first), facts[first], request.port)
        if port.state != "ok":
            raise LaunchError(f"the ranks cannot meet on the first host {first.target}: {port.found}", hint=port.hint)
        self._port = facts[first].port
        cluster.ask({name: {"load_agent": {}} for name in infos}, seconds=_LOAD_SECONDS)
        if cluster.lost:
            check_hosts(cluster.preflight(infos, request.job.variables), len(self._hosts), self._say)
        for host in self._hosts:
            self._start_agent(host)

    def signal(self, number: int) -> None:
        self._signals.append(number)

    def finish(self) -> int:
        """Wait for the end of the run, and return its exit code."""
        while not self._is_over():
            self._cluster.beat()
            self._handle_events()
            for host, reply in tuple(self._agents.items()):
                # Handling a lost host may have removed other hosts too. The replies of removed hosts are ignored.
                if host in self._agents and host not in self._ends and reply.done():
                    self._record_end(host, reply.result())
            self._pass_on_signals()
            if self._failed_since is not None and time.monotonic() - self._failed_since > _ENDING_SECONDS:
                self._print_failure()
            time.sleep(_TICK_SECONDS)
        self._handle_events()
        return self._report_end(set(self._cluster.close()))

    def close(self) -> None:
        self._cluster.close()

    def _start_agent(self, host: Host) -> None:
        request, settings, most = self._request, self._settings, len(self._hosts)
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}
        address = f"[{self._address}]" if ":" in self._address else self._address
        rendezvous = {
            "endpoint": f"{address}:{self._port}",
            "run_id": request.job.run_id,
            "min_nodes": (settings.min_hosts or most) if settings.restarts else most,
            "max_nodes": most,
            "local_addr": self._agent_name(host),
            "is_host": host == self._hosts[0],
            "join_timeout": _MEET_SECONDS,
            "last_call_timeout": _JOIN_SECONDS,
        }
        entrypoint, *args = request.job.rank_command
        workers = {
            "entrypoint": entrypoint,
            "args": args,
            "local_world_size": host.slots,
            "max_restarts": settings.restarts,
            "master_addr": self._address,
        }
        environ = devices | {RUN_ID: request.job.run_id}
        order = {"logs": str(request.logs), "environ": environ, "rendezvous": rendezvous, "workers": workers}
        self._cluster.order(label(host), {"limit_silence": {"seconds": settings.silent_seconds}})
        self._agents[host] = self._cluster.start(
            label(host), {"run_ranks": order}, lambda event: self._events.put((host, event))
        )

    def _agent_name(self, host: Host) -> str:
        return f"{self._hosts.index(host):05}"

    def _handle_events(self) -> None:
        while not self._events.empty():
            host, event = self._events.get()
            if isinstance(event, str):
                # The output of ranks on hosts other than the first goes only to the logs of these ranks.
                if host == self._hosts[0]:
                    self._printed.append(event)
                    self._say(event)
            elif "started" in event:
                self._record_start(host, event)
            else:
                fields = {name: value for name, value in event.items() if name != "age"}
                self._fail(_Failure(host=host, at=time.monotonic() - event["age"], **fields))

    def _fail(self, failure: _Failure) -> None:
        self._failed_since = self._failed_since or time.monotonic()
        self._failures.append(failure)

    def _record_start(self, host: Host, event: Mapping[str, Any]) -> None:
        if event["started"] != self._attempt:
            self._print_failure()
            if self._failures:
                self._say(f"starting again, restart {event['restart']} of {self._settings.restarts}")
            self._attempt, self._began = event["started"], time.monotonic()
            self._started, self._failures, self._failed_since, self._is_failure_printed = {}, [], None, False
        self._started[host] = event
        if len(self._started) == len(event["members"]):
            rows = []
            for each, start in sorted(self._started.items(), key=lambda item: item[1]["ranks"]):
                devices = spans_text(each.devices or range(each.slots))
                rows.append((each.target, spans_text(start["ranks"]), devices, start["interface"]))
            for line in table(("host", "ranks", "devices", "interface"), rows):
                self._say(line)

    def _record_end(self, host: Host, result: Reply | str) -> None:
        if not isinstance(result, str):
            self._ends[host] = result[0]["run_ranks"]
            is_ending = self._ends[host] is not True
        else:
            check, tail = self._cluster.lose(label(host), result), result.splitlines()[-_TAIL_LINES:]
            text = check.found if tail else "its agent or the connection has ended"
            # A lost host is noticed only after `silent_seconds`. Ranks of other hosts fail in that time as a
            # result, so the failure of the lost host gets an earlier time than theirs.
            at = time.monotonic() - self._settings.silent_seconds
            self._fail(_Failure(host, None, text, RUN_ERROR_EXIT_CODE, at, tail=tail))
            is_ending = host == self._hosts[0] or not self._settings.restarts
            self._remove(host)
        if is_ending:
            self._ending_since = self._ending_since or time.monotonic()
        self._regroup()

    def _remove(self, host: Host) -> None:
        del self._agents[host]
        for other in self._agents:
            self._cluster.order(label(other), {"lose": {"name": self._agent_name(host)}})

    def _pass_on_signals(self) -> None:
        if self._num_passed_on == len(self._signals):
            return
        self._num_passed_on += 1
        is_running = len(self._started) == len(self._agents) and not self._failures
        self._is_killed = self._num_passed_on > 1 or not is_running
        self._say(KILL_NOTICE if self._is_killed else SAVE_NOTICE)
        for host in () if self._is_killed else self._agents:
            self._cluster.order(label(host), {"save": {}})

    def _is_over(self) -> bool:
        if self._is_killed or self._agents.keys() <= self._ends.keys():
            return True
        if self._ending_since is None:
            return False
        codes = {failure.code for failure in self._failures}
        return codes != {INTERRUPTED_EXIT_CODE} and time.monotonic() - self._ending_since > _ENDING_SECONDS

    def _regroup(self) -> None:
        """After a loss of hosts, leave out further ones until layout and batch fit. If too few remain, end the run."""
        present = [host for host in self._hosts if host in self._agents]
        fitting = largest_fit(self._request, present, device=self._device)
        if self._ending_since is None and not fitting:
            self._say(f"gave up: {len(present)} hosts are left, too few; the same command resumes the run")
            self._ending_since = time.monotonic()
        for host in [host for host in present if host not in fitting] if self._ending_since is None else ():
            self._say(f"left out: {host.target}: layout and batch allow {len(fitting)} of {len(present)} hosts")
            self._remove(host)
            threading.Thread(target=self._cluster.end, args=(label(host),), daemon=True).start()

    def _report_end(self, late: Set[str]) -> int:
        ends = [self._ends.get(host, False) for host in self._agents]
        if ends and all(end is True for end in ends) and not self._failures:
            self._say(f"attempt {self._attempt} done in {time.monotonic() - self._began:.0f} s")
            return 0
        self._print_failure()
        for end in {end for end in ends if isinstance(end, str)}:
            self._say(f"gave up: {end}; the same command resumes the run")
        hosts = [host for host in self._hosts if host not in self._agents or label(host) in late]
        where = (
            f" on all hosts but {', '.join(host.target for host in hosts)}, which cannot be reached" if hosts else ""
        )
        self._say(f"every process of the run has ended{where}")
        if self._is_killed:
            return 128 + self._signals[-1]
        return self._first_failure().code if self._failures else RUN_ERROR_EXIT_CODE

    def _print_failure(self) -> None:
        if not self._failures or self._is_failure_printed:
            return
        self._is_failure_printed, first = True, self._first_failure()
        who = f"host {first.host.target}" if first.rank is None else f"rank {first.rank} on {first.host.target}"
        head = f"attempt {self._attempt} failed after {max(0.0, first.at - self._began):.1f} s"
        lines = first.error.splitlines() or first.tail
        is_printed = first.rank == 0 or not lines or any(lines[0] in line for line in (*self._printed, first.text))
        if first.code == INTERRUPTED_EXIT_CODE:
            self._say(f"attempt {self._attempt}: saved after a signal; the same command resumes the run")
        elif first.code == USER_ERROR_EXIT_CODE and is_printed and first.rank is not None:
            self._say(f"{head} by the error above, with exit code {first.code}")
        else:
            self._say(f"{head}: {first.cause or f'{who} failed first: {first.text}'}")
            folder = self._request.logs / f"attempt-{self._attempt}"
            name = "" if first.rank is None else f" of {folder / log_name(first.rank)}"
            if not is_printed:
                self._say("its error:" if first.error else f"the last {len(lines)} lines{name or ' of its output'}:")
                for line in lines:
                    self._say(f"{_QUOTED}{line}")

    def _first_failure(self) -> _Failure:
        return min(self._failures, key=lambda failure: failure.at)


def run_scheduler(command: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run mpirun or srun, which supervise the ranks. Returns the exit code, or 128 + N if signal N ended the command.

    The first signal to this process asks the ranks to save and stop; the second one kills them.
    """
    scheduler = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(env), start_new_session=True)
    num_signals = 0

    def pass_on(_: int) -> None:
        nonlocal num_signals
        num_signals += 1
        # mpirun and srun pass SIGUSR1 on to the ranks, and kill the ranks on SIGTERM.
        scheduler.send_signal(signal.SIGUSR1 if num_signals == 1 else signal.SIGTERM)
        say(SAVE_NOTICE if num_signals == 1 else KILL_NOTICE)

    with handle_signals(pass_on):
        code = scheduler.wait()
    return 128 - code if code < 0 else code
