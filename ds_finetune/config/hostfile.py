"""Reads hostfiles, and selects hosts and devices as DeepSpeed's `--include` and `--exclude` do."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_finetune.config.run_file import read_text
from ds_finetune.errors import LaunchError

_EXAMPLES = "`worker-1 slots=8`, `me@10.0.0.2:2222 slots=4` or `[fe80::1]:22 slots=8`"
_TARGET = re.compile(
    r"(?:(?P<user>[^@\s]*)@)?"
    r"(?:\[(?P<v6>[^\]\s]*)\](?::(?P<port6>\S*))?|(?P<name>[^:\s]*)(?::(?P<port>[^:\s]*))?|(?P<bare>\S*))$"
)


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: the ssh destination, and the devices of the host that are used."""

    name: str
    """Host name or address, without user, port and brackets."""
    slots: int
    """Number of ranks to start on the host."""
    line: int
    """Number of the host's line in the hostfile, from 1."""
    user: str = ""
    """User that ssh logs in as; empty for the default of ssh."""
    port: int = 0
    """Port of the host's ssh server; 0 for the default of ssh."""
    devices: tuple[int, ...] = ()
    """Device numbers selected by `--include` or `--exclude`; empty for the first `slots` devices."""

    @property
    def target(self) -> str:
        """Destination argument of ssh: `user@name`, or only the name."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read the hosts of a hostfile. A LaunchError names line and column of an invalid entry.

    A missing hostfile is an error too, while DeepSpeed would start on this machine only.

    A line is `HOST slots=N`. HOST is `name`, `user@name`, `name:port`, an IPv6 address, or an IPv6 address in brackets
    with a port. `#` begins a comment. DeepSpeed 0.19.8 reads the same lines (launcher/runner.py, `_parse_hostfile`),
    but gives ports to ssh as part of the name.
    """
    hint = "name a file with lines such as `worker-1 slots=8`; a run is never started locally instead"
    lines = read_text(path, "hostfile", hint, error=LaunchError).splitlines()
    hosts: dict[tuple[str, int], Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0]
        if not text.strip():
            continue
        host = _read_host(text, f"{path} line {number}", number)
        # Two containers on one machine have the same host name and differ by the ports of their sshd.
        same = hosts.get((host.name, host.port))
        if same is not None:
            raise LaunchError(
                f"{path} line {number}: host `{host.name}` is already in line {same.line}", hint="write each host once"
            )
        hosts[host.name, host.port] = host
    if not hosts:
        raise LaunchError(
            f"hostfile `{path}` has {len(lines)} lines and names no host", hint="write lines such as `worker-1 slots=8`"
        )
    return tuple(hosts.values())


def select_hosts(hosts: Sequence[Host], *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Select the hosts and devices named by `include`, or all except those named by `exclude`, in the order of `hosts`.

    Both are written as for DeepSpeed: `host1@host2:0,2` is all of host1 and devices 0 and 2 of host2. LaunchError if
    both are given, if a named host or device does not exist, if two lines have the named host, or if no device remains.
    """
    if include and exclude:
        raise LaunchError(f"--include {include} and --exclude {exclude} are both given", hint="give only one of them")
    if not include and not exclude:
        return tuple(hosts)
    named = _named_devices(include or exclude, hosts, "--include" if include else "--exclude")
    selected = []
    for host in hosts:
        devices = [d for d in range(host.slots) if (d in named.get(host.name, ())) == bool(include)]
        if devices:
            selected.append(
                host if len(devices) == host.slots else replace(host, slots=len(devices), devices=tuple(devices))
            )
    if not selected:
        raise LaunchError(
            f"--exclude {exclude} leaves none of {sum(host.slots for host in hosts)} devices", hint="exclude fewer"
        )
    return tuple(selected)


def _named_devices(text: str, hosts: Sequence[Host], option: str) -> dict[str, set[int]]:
    slots = {host.name: host.slots for host in hosts}
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, devices = part, ""
        if part not in slots:
            name, _, devices = part.rpartition(":") if ":" in part else (part, "", "")
        name = name.removeprefix("[").removesuffix("]")
        if name not in slots:
            near = difflib.get_close_matches(name, slots, n=1)
            raise LaunchError(
                f"{option} names host `{name}`, which is not among the {len(slots)} hosts of the hostfile",
                hint=f"did you mean `{near[0]}`?" if near else f"its hosts are {', '.join(list(slots)[:8])}",
            )
        if len(lines := [str(host.line) for host in hosts if host.name == name]) > 1:
            raise LaunchError(
                f"{option} names host `{name}`, but lines {' and '.join(lines)} of the hostfile both have this name",
                hint="write another name or address of the host in one of these lines",
            )
        if devices and not re.fullmatch(r"\d+(,\d+)*", devices):
            raise LaunchError(
                f"{option}: `{devices}` after host `{name}` is not a list of device numbers",
                hint="write e.g. `worker-1:0,2`",
            )
        wanted = {int(d) for d in devices.split(",")} if devices else set(range(slots[name]))
        beyond = sorted(d for d in wanted if d >= slots[name])
        if beyond:
            raise LaunchError(
                f"{option} names device {beyond[0]} of host `{name}`, which has slots={slots[name]}",
                hint=f"name devices 0 to {slots[name] - 1}",
            )
        named.setdefault(name, set()).update(wanted)
    return named


def _read_host(text: str, where: str, number: int) -> Host:
    match = re.match(r"^\s*(\S+)(\s*)(.*?)\s*$", text)
    assert match
    target, rest, at, column = match[1], match[3], match.start(1) + 1, match.start(3) + 1
    if "=" in target:
        raise LaunchError(f"{where} column {at}: expected a host, not `{target}`", hint=f"write e.g. {_EXAMPLES}")
    name, user, port = _read_target(target, f"{where} column {at}")
    slots = re.fullmatch(r"slots\s*=\s*(\d+)", rest)
    if not slots:
        raise LaunchError(
            f"{where} column {column}: host `{target}` is followed by `{rest}`, which is not `slots=N`",
            hint=f"write e.g. {_EXAMPLES}",
        )
    if not int(slots[1]):
        raise LaunchError(
            f"{where} column {column}: host `{target}` has slots=0",
            hint="delete the line, or write its number of ranks",
        )
    return Host(name, int(slots[1]), number, user, port)


def _read_target(target: str, where: str) -> tuple[str, str, int]:
    match = _TARGET.match(target)
    assert match, target
    name = match["v6"] or match["name"] or match["bare"] or ""
    port = match["port6"] if match["v6"] is not None else match["port"]
    if (
        match["user"] == ""
        or not re.fullmatch(r"[A-Za-z0-9_.:%-]+", name)
        or name.startswith("-")
        or (match["user"] or "").startswith("-")
    ):
        raise LaunchError(f"{where}: `{target}` is not a host name or address", hint=f"write e.g. {_EXAMPLES}")
    if port is not None and not (re.fullmatch(r"\d{1,5}", port) and 0 < int(port) < 65536):
        raise LaunchError(f"{where}: port `{port}` of host `{name}` is not from 1 to 65535", hint=f"e.g. {_EXAMPLES}")
    return name, match["user"] or "", int(port or 0)
