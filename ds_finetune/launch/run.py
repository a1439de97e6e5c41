"""`ds-finetune launch`: a run on the hosts of a hostfile, started again where it failed, with an exit code that is
true.
"""

import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import (
    INTERRUPTED_EXIT_CODE,
    RUN_ERROR_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    ConfigError,
    LaunchError,
)
from ds_finetune.hostfile import Host
from ds_finetune.hosts.check import label
from ds_finetune.hosts.checks import port_check, rank_device
from ds_finetune.hosts.info import HostInfo, gather_host_info
from ds_finetune.launch import node_launchers as agents
from ds_finetune.launch.attempt import ECHO_SECONDS, Attempt, AttemptOutcome, HostTimeouts
from ds_finetune.launch.messages import Message, unpacked
from ds_finetune.launch.preflight import Answer, describe, meeting_address, preflight_checks
from ds_finetune.launch.process_tags import log_name, logs_folder
from ds_finetune.launch.remote import Remote
from ds_finetune.plan.plan import make_plan
from ds_finetune.watchdog.process_death import FOLDER
from ds_finetune.world import World

Say = Callable[[str], None]
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What another launch left in a shell must not reach this one."""
_AGAIN_SECONDS = 5.0
"""Between two looks for hosts that are to come back."""
_SWEEP_SECONDS = 20
_QUOTED = "  | "


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started, and where."""

    hosts: tuple[Host, ...]
    agent: agents.NodeLauncher
    """torchrun's or DeepSpeed's program that starts the ranks of one host."""
    arguments: tuple[str, ...]
    """Run file and overrides, as `train` takes them."""
    env: dict[str, str]
    """Environment variables that every rank has."""
    remote: Remote
    run_id: str
    port: int = 0
    """Where ranks meet on the first host; 0 takes a free one."""


@dataclass(frozen=True)
class _ReadyHosts:
    """Hosts that were asked and are fit for an attempt."""

    attempt: Attempt
    hosts: tuple[Host, ...]
    address: str
    port: int


def launch(config: RunConfig, request: LaunchRequest, say: Say) -> int:
    """Run `wanted` until it is done, given up or saved after a signal; returns the exit code.

    0 done; 2 the user's mistake, with nothing started where hosts were not ready; 3 saved after a signal; else the
    first failing rank's own exit code, or 128 + N where signal N ended it. LaunchError and ConfigError before the
    first start.
    """
    _refuse_unrestartable(config)
    logs = logs_folder(config.output_dir, request.run_id)
    say(f"run {request.run_id}: logs in {logs} on each host")
    marks: dict[Host, list[str]] = {host: [] for host in request.hosts}
    code = RUN_ERROR_EXIT_CODE
    for number in count(1):
        with _ready_hosts(config, request, say, is_first=number == 1) as ready:
            if ready is None:
                say(
                    f"given up: too few of {len(request.hosts)} hosts were ready within "
                    f"{config.launch.wait_seconds:.0f} s; the same command goes on"
                )
                return code
            specs = _specs(
                ready,
                request,
                config,
                folder=logs / f"attempt-{number}",
                mark=f"{request.run_id}.{number}",
                sweep=marks,
            )
            outcome = ready.attempt.run(specs, say)
        for host, spec in specs.items():
            marks[host].append(spec["mark"])
        outcome = _swept(outcome, request, specs)
        for line in _report(outcome, number, logs):
            say(line)
        code = outcome.code
        # A mistake of the user's is one from the start: later it is a host's, whose disk is full or whose mount is
        # gone.
        is_final = code in (0, INTERRUPTED_EXIT_CODE) or (code == USER_ERROR_EXIT_CODE and number == 1)
        if is_final or outcome.was_told or number > config.launch.restarts:
            return code
        say(f"starting again, {number} of {config.launch.restarts} times")
    raise AssertionError


def plan_for(config: RunConfig, hosts: Sequence[Host], *, device: str) -> None:
    """ConfigError where the layout or the batch does not fit the ranks of `hosts`."""
    slots = [host.slots for host in hosts]
    make_plan(config, world=World(0, sum(slots), 0, slots[0], "launch"), device=device)


def _refuse_unrestartable(config: RunConfig) -> None:
    restarts, wanted = config.launch.restarts, config.checkpoint
    if restarts and wanted.resume != "auto":
        raise ConfigError(
            f"launch.restarts is {restarts} and checkpoint.resume is `{wanted.resume}`: a second start would not go "
            "on from the first",
            hint="leave checkpoint.resume out, with an output_dir of its own",
        )
    if restarts and not wanted.every_steps:
        raise ConfigError(
            f"launch.restarts is {restarts} and checkpoint.every is `{wanted.every}`",
            hint="set checkpoint.every to e.g. `500 steps`",
        )
    if config.launch.min_hosts is not None and wanted.node_local:
        raise ConfigError(
            f"launch.min_hosts is {config.launch.min_hosts} and checkpoint.node_local is true: what a lost host "
            "saved is lost with it",
            hint="save to a shared folder, or leave launch.min_hosts out",
        )


@contextmanager
def _ready_hosts(
    config: RunConfig, request: LaunchRequest, say: Say, *, is_first: bool
) -> Iterator[_ReadyHosts | None]:
    """Supervisors on the hosts of an attempt, None where too few hosts are fit.

    The first attempt needs all hosts; a later one takes those that are left or have come back.
    """
    timeouts = HostTimeouts(config.launch.greeting_seconds, config.launch.silent_seconds)
    until = time.monotonic() + config.launch.wait_seconds
    while True:
        with Attempt(request.hosts, request.remote, timeouts, port=request.port) as attempt:
            ready = _select_hosts(config, request, attempt, say, is_first=is_first)
            if ready is not None:
                yield ready
                return
        if time.monotonic() > until:
            yield None
            return
        time.sleep(_AGAIN_SECONDS)


def _select_hosts(
    config: RunConfig, request: LaunchRequest, attempt: Attempt, say: Say, *, is_first: bool
) -> _ReadyHosts | None:
    answers = attempt.greetings()
    fit = fit_hosts(answers, gather_host_info(), request, say, is_first=is_first)
    infos = {host: answer for host, answer in answers.items() if isinstance(answer, HostInfo)}
    device = rank_device({label(host): info for host, info in infos.items()}, request.env)
    if is_first:
        plan_for(config, fit, device=device)
    hosts = fit if is_first else largest_fit(config, request.hosts, fit, device=device)
    if not hosts:
        return None
    first, address = hosts[0], meeting_address(hosts, infos)
    if not address:
        raise LaunchError(
            f"{first.target} has no address that the other {len(hosts) - 1} hosts could reach: its interfaces are "
            f"{', '.join(infos[first].interfaces)}",
            hint="write its address in the network of the others into the hostfile",
        )
    port = port_check(label(first), infos[first], request.port)
    if port.state == "ok":
        return _ReadyHosts(attempt, hosts, address, infos[first].port)
    if is_first:
        raise LaunchError(f"{first.target}: {port.found}", hint=port.hint)
    # The process that held the port before may still be ending.
    say(f"waiting for {first.target}: {port.found}")
    return None


def fit_hosts(
    answers: Mapping[Host, Answer], here: HostInfo, request: LaunchRequest, say: Say, *, is_first: bool
) -> tuple[Host, ...]:
    """The hosts without a failed check; before the first attempt a LaunchError where a check failed."""
    checks = preflight_checks(answers, here, request.env)
    failed = {
        host: [describe(host, check) for check in found if check.state == "fail"] for host, found in checks.items()
    }
    texts = [text for found in failed.values() for text in found]
    if texts and is_first:
        raise LaunchError(
            f"{sum(map(bool, failed.values()))} of {len(answers)} hosts are not ready, nothing was started:\n  "
            + "\n  ".join(texts),
            hint="`ds-finetune doctor --hostfile` checks more; --exclude leaves a host out",
        )
    for text in texts:
        say(f"left out: {text}")
    for host, found in checks.items() if is_first else ():
        for check in (check for check in found if check.state == "warn"):
            say(f"warning: {describe(host, check)}")
    return tuple(host for host in request.hosts if not failed[host])


def largest_fit(config: RunConfig, hosts: Sequence[Host], fit: Sequence[Host], *, device: str) -> tuple[Host, ...]:
    """The first of `fit` on which the run can go on, as many as its layout and its global batch allow; none where they
    are too few.
    """
    fewest = config.launch.min_hosts or len(hosts)
    for number in range(len(fit), fewest - 1, -1):
        try:
            plan_for(config, fit[:number], device=device)
        except ConfigError:
            continue
        return tuple(fit[:number])
    return ()


def _specs(  # noqa: PLR0913
    ready: _ReadyHosts,
    request: LaunchRequest,
    config: RunConfig,
    *,
    folder: Path,
    mark: str,
    sweep: Mapping[Host, Sequence[str]],
) -> dict[Host, Message]:
    found = {}
    for index, host in enumerate(ready.hosts):
        env = request.env | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {})
        found[host] = {
            "do": "start",
            "argv": request.agent(
                agents.Rendezvous(ready.hosts, index, ready.address, ready.port),
                request.arguments,
                request.remote.python,
            ),
            "env": env,
            "unset": _RANK_VARIABLES,
            "mark": f"{mark}.{index}",
            "sweep": list(sweep[host]),
            "logs": str(folder),
            "watchdog": str(Path(config.output_dir) / FOLDER),
            "silent_seconds": config.launch.silent_seconds,
            "meet_at": ready.address if len(ready.hosts) > 1 else "",
        }
    return found


def _swept(outcome: AttemptOutcome, request: LaunchRequest, specs: dict[Host, Message]) -> AttemptOutcome:
    """End what is left on hosts whose guard is gone; a host on which that cannot be done counts as lost."""

    def is_swept(host: Host) -> bool:
        command = request.remote.module(host, "ds_finetune.launch.supervisor", "sweep", specs[host]["mark"])
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SWEEP_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        lines = done.stdout.decode(errors="replace").splitlines()
        said = [unpacked(line, to=specs[host]["mark"]) or {} for line in lines]
        return done.returncode == 0 and any(message.get("left") == 0 for message in said)

    if not outcome.unsupervised:
        return outcome
    with ThreadPoolExecutor(max_workers=len(outcome.unsupervised)) as pool:
        swept = dict(zip(outcome.unsupervised, pool.map(is_swept, outcome.unsupervised), strict=True))
    return replace(outcome, lost=(*outcome.lost, *(host for host, done in swept.items() if not done)))


def _report(outcome: AttemptOutcome, number: int, logs: Path) -> Iterator[str]:
    """What happened, in words; written to the logs as well."""
    if outcome.first is None:
        yield f"attempt {number} done in {outcome.seconds:.0f} s"
        return
    lines = list(_failure_lines(outcome, number, logs))
    folder = logs / f"attempt-{number}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as full:
        lines.append(f"{folder}/report.txt could not be written: {full.strerror}")
    # What rank 0 prints has been shown as it came.
    is_shown = outcome.first.rank == 0
    yield from (line for line in lines if not (is_shown and line.startswith(_QUOTED)))


def _failure_lines(outcome: AttemptOutcome, number: int, logs: Path) -> Iterator[str]:
    first = outcome.first
    assert first is not None
    who = f"host {first.host.target}" if first.rank is None else f"rank {first.rank} on {first.host.target}"
    if outcome.code == INTERRUPTED_EXIT_CODE:
        yield f"attempt {number}: saved after a signal; the same command goes on"
        return
    yield f"attempt {number} failed after {first.after:.1f} s: {who} was first and {first.text}"
    if first.tail:
        of = f", of {logs}/attempt-{number}/{log_name(first.rank)}" if first.rank is not None else ""
        yield f"its last {len(first.tail)} lines{of}:"
        yield from (f"{_QUOTED}{line}" for line in first.tail)
    lost = [host.target for host in outcome.lost]
    where = f"hosts but {', '.join(lost)}, which cannot be asked and where it ends by itself" if lost else "hosts"
    if outcome.left:
        counts = ", ".join(f"{count} on {host.target}" for host, count in outcome.left.items())
        yield f"PROCESSES LEFT that do not end, as where they wait for a disk or a device: {counts}"
        return
    yield f"nothing of it is left on the {where}; {outcome.ended_in:.1f} s after the failure"


def run_scheduler(command: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run mpirun or srun, which mind their ranks themselves; returns a true exit code. The first signal asks ranks to
    save and end.
    """
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(env), start_new_session=True)
    signals, since = 0, -math.inf

    def pass_on(_: int, __: object) -> None:
        nonlocal signals, since
        if time.monotonic() - since < ECHO_SECONDS:
            return
        signals, since = signals + 1, time.monotonic()
        # Both pass SIGUSR1 on to the ranks, and end them on SIGTERM.
        started.send_signal(signal.SIGUSR1 if signals == 1 else signal.SIGTERM)
        say("told the ranks to save and end; once more ends them at once" if signals == 1 else "ending every rank")

    wanted = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, pass_on) for number in wanted}
    try:
        code = started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code
