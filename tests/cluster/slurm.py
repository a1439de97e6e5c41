"""Slurm on the test bed: a controller on the first host, a node daemon on each, keys and state in the bed's folder."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ds_finetune.cluster.launch.commands import Job
from tests.cluster.bed import SECONDS, Bed
from tests.cluster.training import name_hosts

_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "unshare")
CPUS = 2
"""Of each node; Slurm drains nodes that have fewer than their configuration says, so this is what any machine has."""


def why_no_slurm() -> str:
    """Why Slurm cannot be started here; empty where it can."""
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if (os.cpu_count() or 1) >= CPUS else f"nodes of {CPUS} CPUs on a machine of {os.cpu_count()}"


class Slurm:
    """A cluster of nodes `n1`, `n2`, ... on the hosts of a bed; `with` takes it down."""

    def __init__(self, bed: Bed) -> None:
        self.bed, self.folder = bed, bed.shared / "slurm"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        self.folder.mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._write_configuration()
        name_hosts(self.bed, [f"n{number}" for number in range(1, len(self.bed.hosts) + 1)])
        try:
            own = [
                f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file")
            ]
            self._start(
                1, ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge", *own]
            )
            self._start(1, ["slurmctld", "-D"])
            for number in range(1, len(self.bed.hosts) + 1):
                self._start(number, ["slurmd", "-D"])
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(SECONDS)

    def run(
        self, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host as a user of the cluster."""
        return self.bed.run(1, self.on(1, argv), {**self.environ, **(environ or {})}, timeout=timeout)

    @property
    def environ(self) -> dict[str, str]:
        """Where Slurm's commands find the cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def logs(self) -> str:
        """What the daemons said."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def on(self, number: int, argv: Sequence[str]) -> list[str]:
        """A command of a host, with the node's name as the name of the machine, by which Slurm's daemons find
        themselves.
        """
        return ["unshare", "--uts", "sh", "-c", f'hostname n{number} && exec "$@"', "sh", *argv]

    def _start(self, number: int, argv: Sequence[str]) -> None:
        with (self.folder / f"{argv[0]}-{number}.log").open("ab") as log:
            command = self.bed.command(number, self.on(number, argv))
            environ = os.environ | self.environ
            self._daemons.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
                )
            )

    def _wait(self) -> None:
        until = time.monotonic() + SECONDS
        wanted = ["idle"] * len(self.bed.hosts)
        while self.run(["sinfo", "--noheader", "--Node", "--format=%t"], timeout=SECONDS).stdout.split() != wanted:
            assert time.monotonic() < until, self.logs()
            time.sleep(0.3)

    def _write_configuration(self) -> None:
        nodes = [
            f"NodeName=n{n} NodeAddr={host.address} CPUs={CPUS} State=UNKNOWN"
            for n, host in enumerate(self.bed.hosts, 1)
        ]
        lines = {
            "ClusterName": "bed",
            "SlurmctldHost": f"n1({self.bed.hosts[0].address})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.folder}/munge",
            "CryptoType": "crypto/munge",
            "StateSaveLocation": f"{self.folder}/state",
            "SlurmdSpoolDir": f"{self.folder}/spool-%n",
            "SlurmctldPidFile": f"{self.folder}/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "ReturnToService": "2",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "KillWait": "5",
        }
        for name in ("state", *(f"spool-n{n}" for n in range(1, len(nodes) + 1))):
            (self.folder / name).mkdir()
        partition = f"PartitionName=all Nodes=n[1-{len(nodes)}] Default=YES MaxTime=INFINITE State=UP"
        text = "\n".join([*(f"{name}={value}" for name, value in lines.items()), *nodes, partition])
        (self.folder / "slurm.conf").write_text(text + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def allocate(slurm: Slurm, job: Job) -> list[str]:
    """The command that gets the first two nodes, with their CPUs, and starts a job's ranks there by srun."""
    values = json.dumps(asdict(job))
    nodes = ["salloc", "--quiet", "--nodelist=n1,n2", "--nodes=2", "--exclusive"]
    return slurm.on(1, [*nodes, sys.executable, "-m", "tests.cluster.allocated", values])
