"""`ds-finetune launch`: a run on the hosts of a hostfile, restarted where it fails, with a true exit code."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from ds_finetune.cluster.host_checks import (
    Answer,
    describe,
    label,
    meeting_address,
    port_check,
    preflight_checks,
    rank_device,
)
from ds_finetune.cluster.launch.attempt import KILL_NOTICE, SAVE_NOTICE, Attempt, AttemptOutcome, handle_signals
from ds_finetune.cluster.launch.commands import NodeLauncher, Rendezvous
from ds_finetune.cluster.launch.messages import LeftoversKilled, StartRanks
from ds_finetune.cluster.launch.process_tags import log_name, logs_folder
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.cluster.watchdog.kills import FOLDER
from ds_finetune.config.hostfile import Host
from ds_finetune.config.sections import CheckpointConfig, LaunchConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import (
    INTERRUPTED_EXIT_CODE,
    RUN_ERROR_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    ConfigError,
    LaunchError,
)
from ds_finetune.system.info import HostInfo, gather_host_info
from ds_finetune.system.process_messages import decode, without_token

_RANK_VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
"""Variables removed from the environment of ranks: the shell may still have them from another launch."""
_POLL_SECONDS = 5.0
"""Time between two attempts to reach hosts that may come back."""
_LEFTOVERS_SECONDS = 20
_QUOTED = "  | "


@dataclass(frozen=True)
class LaunchRequest:
    """What `launch` starts, and on which hosts."""

    hosts: tuple[Host, ...]
    node_launcher: NodeLauncher
    """Makes the command of torchrun or of DeepSpeed's launcher that starts the ranks of one host."""
    arguments: tuple[str, ...]
    """Run file and overrides, as `train` takes them."""
    env: dict[str, str]
    """Environment variables of every rank."""
    remote: Remote
    run_id: str
    output_dir: str
    launch: LaunchConfig
    checkpoint: CheckpointConfig
    check_plan: Callable[[Sequence[Host], str], object]
    """ConfigError where the run's layout or batch does not fit the ranks of some hosts on a kind of device."""
    port: int = 0
    """Port of rank 0 on the first host; 0 takes a free port."""


@dataclass(frozen=True)
class _ReadyHosts:
    """Hosts that have passed all checks, for one attempt, and the address and port of rank 0."""

    attempt: Attempt
    hosts: tuple[Host, ...]
    address: str
    port: int


def launch(request: LaunchRequest, say: Say) -> int:
    """Run `request` until it is done, has failed for good or has saved after a signal; returns the exit code.

    0 done; 2 a mistake of the user, also where hosts were not ready and nothing was started; 3 saved after a signal;
    else the exit code of the first failed rank, or 128 + N where signal N killed it. LaunchError and ConfigError
    before the first start.
    """
    _check_restartable(request.launch, request.checkpoint)
    logs = logs_folder(request.output_dir, request.run_id)
    say(f"run {request.run_id}: logs in {logs} on each host")
    tags: dict[Host, list[str]] = {host: [] for host in request.hosts}
    code = RUN_ERROR_EXIT_CODE
    for number in count(1):
        with _ready_hosts(request, say, is_first=number == 1) as ready:
            if ready is None:
                say(
                    f"gave up: fewer than the needed hosts of {len(request.hosts)} were ready within "
                    f"{request.launch.wait_seconds:.0f} s; the same command resumes the run"
                )
                return code
            orders = _orders(request, ready, number=number, earlier_tags=tags)
            outcome = ready.attempt.run(orders, say)
        for host, order in orders.items():
            tags[host].append(order.tag)
        outcome = _kill_leftovers(outcome, request, orders)
        for line in _report(outcome, number, logs):
            say(line)
        code = outcome.code
        # A mistake of the user fails the first attempt; later a host causes this code, for example by a full disk.
        is_final = code in (0, INTERRUPTED_EXIT_CODE) or (code == USER_ERROR_EXIT_CODE and number == 1)
        if is_final or outcome.was_signalled or number > request.launch.restarts:
            return code
        say(f"starting again, restart {number} of {request.launch.restarts}")
    raise AssertionError


def _check_restartable(settings: LaunchConfig, checkpoint: CheckpointConfig) -> None:
    if settings.restarts and checkpoint.resume != "auto":
        raise ConfigError(
            f"launch.restarts is {settings.restarts} and checkpoint.resume is `{checkpoint.resume}`: a second start "
            "would not resume the first",
            hint="leave checkpoint.resume out, with an output_dir of its own",
        )
    if settings.restarts and not checkpoint.saves:
        raise ConfigError(
            f"launch.restarts is {settings.restarts} and checkpoint.every is `{checkpoint.every}`",
            hint="set checkpoint.every to e.g. `500 steps`",
        )
    if settings.min_hosts is not None and checkpoint.node_local:
        raise ConfigError(
            f"launch.min_hosts is {settings.min_hosts} and checkpoint.node_local is true: what a lost host "
            "saved is lost with it",
            hint="save to a shared folder, or leave launch.min_hosts out",
        )


@contextmanager
def _ready_hosts(request: LaunchRequest, say: Say, *, is_first: bool) -> Iterator[_ReadyHosts | None]:
    """Start supervisors on the hosts of an attempt; yield None where too few hosts pass their checks.

    The first attempt needs all hosts; a later one takes the hosts that remain or have come back.
    """
    until = time.monotonic() + request.launch.wait_seconds
    while True:
        with Attempt(request.hosts, request.remote, request.launch, port=request.port) as attempt:
            ready = _select_hosts(request, attempt, say, is_first=is_first)
            if ready is not None:
                yield ready
                return
        if time.monotonic() > until:
            yield None
            return
        time.sleep(_POLL_SECONDS)


def _select_hosts(request: LaunchRequest, attempt: Attempt, say: Say, *, is_first: bool) -> _ReadyHosts | None:
    answers = attempt.greetings()
    fit = fit_hosts(answers, gather_host_info(), request, say, is_first=is_first)
    infos = {host: answer for host, answer in answers.items() if isinstance(answer, HostInfo)}
    device = rank_device({label(host): info for host, info in infos.items()}, request.env)
    if is_first:
        request.check_plan(fit, device)
    hosts = fit if is_first else largest_fit(request, fit, device=device)
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
    # The process of the earlier attempt that used the port may still be ending.
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


def largest_fit(request: LaunchRequest, fit: Sequence[Host], *, device: str) -> tuple[Host, ...]:
    """The largest number of `fit` hosts, from the first on, that the run's layout and global batch allow.

    Empty where that is less than launch.min_hosts, or less than all hosts where this key is not set.
    """
    fewest = request.launch.min_hosts or len(request.hosts)
    for number in range(len(fit), fewest - 1, -1):
        try:
            request.check_plan(fit[:number], device)
        except ConfigError:
            continue
        return tuple(fit[:number])
    return ()


def _orders(
    request: LaunchRequest, ready: _ReadyHosts, *, number: int, earlier_tags: Mapping[Host, list[str]]
) -> dict[Host, StartRanks]:
    orders = {}
    for index, host in enumerate(ready.hosts):
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}
        rendezvous = Rendezvous(ready.hosts, index, ready.address, ready.port)
        orders[host] = StartRanks(
            argv=request.node_launcher(rendezvous, request.arguments, request.remote.python),
            env=request.env | devices,
            unset=_RANK_VARIABLES,
            tag=f"{request.run_id}.{number}.{index}",
            earlier_tags=list(earlier_tags[host]),
            logs=str(logs_folder(request.output_dir, request.run_id) / f"attempt-{number}"),
            watchdog=str(Path(request.output_dir) / FOLDER),
            silent_seconds=request.launch.silent_seconds,
            meeting_address=ready.address if len(ready.hosts) > 1 else "",
        )
    return orders


def _kill_leftovers(
    outcome: AttemptOutcome, request: LaunchRequest, orders: Mapping[Host, StartRanks]
) -> AttemptOutcome:
    """Kill remaining processes on hosts whose supervisor ended early; a host on which this fails counts as lost."""

    def is_clean(host: Host) -> bool:
        tag = orders[host].tag
        command = request.remote.module(host, "ds_finetune.cluster.launch.supervisor", "kill", tag)
        try:
            done = subprocess.run(command, capture_output=True, timeout=_LEFTOVERS_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        bodies = [body for line in done.stdout.splitlines() if (body := without_token(line, tag)) is not None]
        replies = [decode(body, [LeftoversKilled], peer=f"the supervisor of {host.target}") for body in bodies]
        return done.returncode == 0 and any(reply.num_remaining == 0 for reply in replies)

    if not outcome.unsupervised:
        return outcome
    with ThreadPoolExecutor(max_workers=len(outcome.unsupervised)) as pool:
        clean = dict(zip(outcome.unsupervised, pool.map(is_clean, outcome.unsupervised), strict=True))
    return replace(outcome, lost=(*outcome.lost, *(host for host, is_done in clean.items() if not is_done)))


def _report(outcome: AttemptOutcome, number: int, logs: Path) -> Iterator[str]:
    """The lines about an attempt's end, which are also written to its report.txt."""
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
    # What rank 0 has printed is not repeated; a mistake of the user is that of every rank, whichever ended first.
    is_printed, after = outcome.first.is_printed, outcome.first.after
    if is_printed and outcome.code == USER_ERROR_EXIT_CODE and outcome.first.rank is not None:
        lines[:2] = [f"attempt {number} failed after {after:.1f} s by the error above, with exit code {outcome.code}"]
    yield from (line for line in lines if not (is_printed and line.startswith(_QUOTED)))


def _failure_lines(outcome: AttemptOutcome, number: int, logs: Path) -> Iterator[str]:
    first = outcome.first
    assert first is not None
    who = f"host {first.host.target}" if first.rank is None else f"rank {first.rank} on {first.host.target}"
    if outcome.code == INTERRUPTED_EXIT_CODE:
        yield f"attempt {number}: saved after a signal; the same command resumes the run"
        return
    # The rank that ends first may only be the first that the watchdog has ended.
    yield f"attempt {number} failed after {first.after:.1f} s: {first.cause or f'{who} failed first: {first.text}'}"
    if first.tail:
        source = f" of {logs}/attempt-{number}/{log_name(first.rank)}" if first.rank is not None else ""
        yield f"the last {len(first.tail)} lines{source or ' of its output'}:"
        yield from (f"{_QUOTED}{line}" for line in first.tail)
    if outcome.remaining:
        counts = ", ".join(f"{number} on {host.target}" for host, number in outcome.remaining.items())
        yield f"PROCESSES REMAIN that do not end, as when they wait for a disk or a device: {counts}"
        return
    lost = ", ".join(host.target for host in outcome.lost)
    where = f" on all hosts but {lost}, which cannot be reached and whose supervisor kills its ranks" if lost else ""
    yield f"every process of the attempt has ended{where}; {outcome.ended_in:.1f} s after the failure"


def run_scheduler(command: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run mpirun or srun, which supervise their ranks themselves; returns an exit code, 128 + N for signal N.

    The first signal asks the ranks to save and stop; the second one kills them.
    """
    scheduler = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(env), start_new_session=True)
    num_signals = 0

    def pass_on(_: int) -> None:
        nonlocal num_signals
        num_signals += 1
        # Both pass SIGUSR1 on to the ranks, and kill them on SIGTERM.
        scheduler.send_signal(signal.SIGUSR1 if num_signals == 1 else signal.SIGTERM)
        say(SAVE_NOTICE if num_signals == 1 else KILL_NOTICE)

    with handle_signals(pass_on):
        code = scheduler.wait()
    return 128 - code if code < 0 else code


def show_if_open(show: Callable[[str], None], line: str) -> bool:
    """Print `line` with `show`, and return whether a further one can be printed: a closed terminal ends no run."""
    try:
        show(line)
    except (OSError, SystemExit):
        # A pipe without a reader: rich ends the program there (14.1, console.py, on_broken_pipe), and Python's flush at
        # exit would change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True
