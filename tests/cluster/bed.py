"""Several hosts on one machine: network namespaces joined by a bridge, each with its address, its sshd and its own
folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.config.hostfile import Host

NETWORK = "10.77.0"
INTERFACE = "e0"
SECONDS = 120
_TOOLS = ("ip", "ssh", "ssh-keygen", "nsenter", "unshare")
_SSHD = "/usr/sbin/sshd"


def why_not() -> str:
    """Why no test bed can be made here; empty where one can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if not shutil.which(tool)] + ([] if Path(_SSHD).exists() else ["sshd"])
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2 openssh-server)"
    tried = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, text=True, check=False)
    return f"namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class BedHost:
    """One host: the process that holds its namespaces and is its sshd."""

    name: str
    address: str
    namespace: str
    sshd: subprocess.Popen[bytes]

    def pids(self) -> set[int]:
        """Processes whose network is this host's."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return {int(pid) for pid in listed.stdout.split()}


class Bed:
    """Hosts `10.77.0.1`, `10.77.0.2`, ... in a folder; `with` takes them down with every process in them.

    `folder/shared` is the same on all; what a host sees as `folder/own` is its `folder/own-N`. Commands run on a host
    by `command`, as if typed there; hosts reach each other with `ssh -F folder/ssh_config`.
    """

    def __init__(self, folder: Path, hosts: int = 2) -> None:
        self.folder, self.hosts = folder, list[BedHost]()
        self._count = hosts
        # Interface names have 15 letters at most; two beds on a machine differ in the process that made them.
        self._mark = f"b{os.getpid() % 100_000}"

    def __enter__(self) -> "Bed":
        (self.folder / "shared").mkdir(parents=True)
        (self.folder / "own").mkdir()
        Path("/run/sshd").mkdir(exist_ok=True)
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        (self.folder / "key.pub").rename(self.folder / "authorized")
        _do("ip", "netns", "add", self._switch)
        try:
            self._in(self._switch, "ip", "link", "add", "br0", "type", "bridge")
            self._in(self._switch, "ip", "link", "set", "br0", "up")
            for number in range(1, self._count + 1):
                self.hosts.append(self._host(number))
            self._write_ssh_config()
            self._wait_for_sshd()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    @property
    def ssh_config(self) -> Path:
        """Options for ssh by which hosts reach each other."""
        return self.folder / "ssh_config"

    @property
    def shared(self) -> Path:
        """A folder that is the same on every host."""
        return self.folder / "shared"

    @property
    def own(self) -> Path:
        """A path under which each host has a folder of its own."""
        return self.folder / "own"

    def hostfile(self, *slots: int) -> Path:
        """A hostfile of the first hosts with these slots."""
        path = self.shared / f"hosts-{'-'.join(map(str, slots))}"
        path.write_text(
            "".join(f"{host.address} slots={count}\n" for host, count in zip(self.hosts, slots, strict=False))
        )
        return path

    def as_hosts(self, *slots: int) -> tuple[Host, ...]:
        """The same as values."""
        return tuple(
            Host(host.address, count, line)
            for line, (host, count) in enumerate(zip(self.hosts, slots, strict=False), start=1)
        )

    def command(self, number: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command of host `number`, from 1."""
        return ["nsenter", f"--target={self.hosts[number - 1].sshd.pid}", "--net", "--mount", "--", *argv]

    def run(
        self, number: int, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return what it printed."""
        where = {**os.environ, **(environ or {})}
        return subprocess.run(
            self.command(number, argv), capture_output=True, text=True, timeout=timeout, check=False, env=where
        )

    def cable(self, number: int, *, plugged: bool) -> None:
        """Pull the cable of a host, or plug it in again."""
        self._in(self._switch, "ip", "link", "set", self._port(number), "up" if plugged else "down")

    def crash(self, number: int) -> None:
        """End every process of a host at once, its sshd as well, with its cable pulled before: nobody is told."""
        self.cable(number, plugged=False)
        for pid in self.hosts[number - 1].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.hosts[number - 1].sshd.wait(SECONDS)

    def repair(self, number: int) -> None:
        """A host that crashed comes back, without any process of before."""
        self.cable(number, plugged=True)
        self.hosts[number - 1].sshd = self._sshd(number)
        self._wait_for_sshd()

    @property
    def _switch(self) -> str:
        return f"{self._mark}-sw"

    def _port(self, number: int) -> str:
        return f"{self._mark}p{number}"

    def _host(self, number: int) -> BedHost:
        namespace, address = f"{self._mark}-{number}", f"{NETWORK}.{number}"
        _do("ip", "netns", "add", namespace)
        _do(
            "ip",
            "-n",
            self._switch,
            "link",
            "add",
            self._port(number),
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            namespace,
        )
        self._in(self._switch, "ip", "link", "set", self._port(number), "master", "br0", "up")
        self._in(namespace, "ip", "link", "set", "lo", "up")
        self._in(namespace, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
        self._in(namespace, "ip", "link", "set", INTERFACE, "up")
        (self.folder / f"own-{number}").mkdir()
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / f"host-key-{number}"))
        return BedHost(f"host{number}", address, namespace, self._sshd(number))

    def _sshd(self, number: int) -> subprocess.Popen[bytes]:
        options = {
            "ListenAddress": f"{NETWORK}.{number}",
            "HostKey": self.folder / f"host-key-{number}",
            "AuthorizedKeysFile": self.folder / "authorized",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "MaxStartups": "100",
        }
        given = " ".join(f"-o {name}={value}" for name, value in options.items())
        mounted = f"mount --make-rprivate / && mount --bind {self.folder}/own-{number} {self.own} && exec {_SSHD} -D -e -f /dev/null {given}"
        log = (self.folder / f"sshd-{number}.log").open("ab")
        command = ["ip", "netns", "exec", f"{self._mark}-{number}", "unshare", "-m", "sh", "-c", mounted]
        # A session of its own: what ends the test's group leaves the host up, and `_down` ends it by id.
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        log.close()
        return started

    def _write_ssh_config(self) -> None:
        known = self.folder / "known_hosts"
        lines = [
            f"{host.address} {(self.folder / f'host-key-{n}.pub').read_text()}"
            for n, host in enumerate(self.hosts, start=1)
        ]
        known.write_text("".join(lines))
        self.ssh_config.write_text(
            f"Host {NETWORK}.*\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n"
        )

    def _wait_for_sshd(self) -> None:
        until = time.monotonic() + SECONDS
        for host in self.hosts:
            while not self._answers(host):
                assert time.monotonic() < until, (self.folder / f"sshd-{host.name[4:]}.log").read_text()
                time.sleep(0.1)

    def _answers(self, host: BedHost) -> bool:
        if host.sshd.poll() is not None:
            return True
        ssh = [
            "nsenter",
            f"--target={host.sshd.pid}",
            "--net",
            "ssh",
            "-F",
            str(self.ssh_config),
            "-o",
            "ConnectTimeout=2",
            host.address,
            "true",
        ]
        return subprocess.run(ssh, capture_output=True, check=False).returncode == 0

    def _in(self, namespace: str, *argv: str) -> None:
        _do("ip", "netns", "exec", namespace, *argv)

    def _down(self) -> None:
        for host in self.hosts:
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            host.sshd.kill()
            host.sshd.wait(SECONDS)
        for namespace in [*(f"{self._mark}-{n}" for n in range(1, self._count + 1)), self._switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _do(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
