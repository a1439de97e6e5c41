"""Ranks and commands as forks of one process that has imported everything already: 10 to 25 s of imports a start become
none.

Each rank is a process of its own with its own process group, and runs the file that a launcher would have started.
What a launcher adds is its variables; those that matter to the program are set here. Tests of launchers, of signals
and of memory start real ones.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.launched import SOCKET, ask

_ROOT = Path(__file__).resolve().parents[1]
_GIVEN = os.environ.get("PYTHONPATH", "")
PYTHON_PATH = _GIVEN if _GIVEN.split(os.pathsep)[0] == str(_ROOT) else str(_ROOT)
"""PYTHONPATH of processes that tests start."""
PATIENCE_SECONDS = 400
"""For the first fork, before which everything is imported."""
ADDRESSES = {False: SOCKET, True: "TESTS_PLAIN_FORK_SERVER"}
"""In the environment: sockets of the fork servers that several test processes share, by whether it is the plain one."""
PARENT = "{pid of the parent}"
"""Stands for it among the words of a program."""
GRACE_SECONDS = 30
"""Between SIGTERM and SIGKILL for the ranks that are left when one has failed, as torchrun does."""


class Forked:
    """A started program, as `subprocess.Popen` would give it; its process is the parent of the ranks, as a launcher's
    is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid = int(self._wait_for("pid", PATIENCE_SECONDS))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        code = self._folder / "code"
        self.returncode = int(code.read_text()) if code.exists() else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code once there is one; TimeoutExpired where there is none in time."""
        try:
            return int(self._wait_for("code", timeout))
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self._folder), timeout) from None

    def ranks(self) -> list[int]:
        """Process ids of the ranks that are alive, by rank."""
        files = sorted(self._folder.glob("rank-*"), key=lambda file: int(file.name.removeprefix("rank-")))
        return [pid for pid in (int(file.read_text()) for file in files) if Path(f"/proc/{pid}").exists()]

    def kill(self) -> None:
        """End all its processes at once."""
        for pid in (*self.ranks(), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _wait_for(self, name: str, seconds: float) -> str:
        until = time.monotonic() + seconds
        while not (self._folder / name).exists():
            if time.monotonic() > until:
                raise TimeoutError(name)
            time.sleep(0.005)
        return (self._folder / name).read_text()


class Forkserver:
    """The process that forks, and what it is asked to run; one for a test session, and one that has imported nothing of
    the package, for what runs without it.
    """

    _made: ClassVar[dict[bool, "Forkserver"]] = {}

    def __init__(self, *, is_plain: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._asked = 0
        self._process: subprocess.Popen[bytes] | None = None
        shared = os.environ.get(ADDRESSES[is_plain])
        self.address = shared or f"{self._folder.name}/socket"
        """Where a fork is asked for."""
        if not shared:
            self._process = self._started(is_plain=is_plain)
            atexit.register(self._process.kill)

    def _started(self, *, is_plain: bool) -> "subprocess.Popen[bytes]":
        """The process, which ends once its standard input closes."""
        environ = os.environ | {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHON_PATH,
            "TOKENIZERS_PARALLELISM": "false",
        }
        environ |= {"HF_HUB_OFFLINE": "1"} if is_plain else {}
        command = [sys.executable, "-m", "tests.forks", self.address, *(["plain"] if is_plain else [])]
        return subprocess.Popen(command, cwd=_ROOT, env=environ, stdin=subprocess.PIPE)

    @classmethod
    def get(cls, *, is_plain: bool = False) -> "Forkserver":
        """The one of this process, started at its first use, or the one whose address is in the environment."""
        made = cls._made.get(is_plain)
        if made is None or (made._process is not None and made._process.poll() is not None):
            cls._made[is_plain] = cls(is_plain=is_plain)
        return cls._made[is_plain]

    def start(
        self, program: Sequence[str], environ: Mapping[str, str], *, ranks: int, out: Path, err: Path, cwd: Path = _ROOT
    ) -> Forked:
        """Start `ranks` ranks of `program` (0: one process without a launcher's variables), which print to two files."""
        self._asked += 1
        folder = Path(self._folder.name) / str(self._asked)
        folder.mkdir()
        for file in (out, err):
            file.touch()
        request = {
            "program": list(program),
            "environ": dict(environ),
            "ranks": ranks,
            "folder": str(folder),
            "out": str(out),
            "err": str(err),
        }
        request["cwd"] = str(cwd)
        ask(self.address, request)
        return Forked(folder)

    def run(
        self, program: Sequence[str], environ: Mapping[str, str], *, ranks: int, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """What the ranks printed, and the exit code a launcher gives."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            started = self.start(program, environ, ranks=ranks, out=out, err=err)
            try:
                code = started.wait(timeout)
            finally:
                started.kill()
            return subprocess.CompletedProcess(
                list(program), code, *(file.read_text(errors="replace") for file in (out, err))
            )


_IMPORTED = (
    "ds_finetune.engine",
    "deepspeed",
    "torch",
    "datasets",
    "peft",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
)
_IMPORTED += (
    "ds_finetune.reference.bench.step_speed",
    "ds_finetune.cli.main",
    "ds_finetune.console.tables",
    "ds_finetune.runs.report.write",
    "ds_finetune.trainer.train",
    "ds_finetune.reference.selftest.run",
)
_IMPORTED += tuple(
    f"transformers.models.{family}.modeling_{family}"
    for family in ("deepseek_v2", "deepseek_v3", "llama", "qwen2", "qwen3")
)


_IMPORTED_PLAIN = ("torch", "transformers.modeling_utils", "transformers.generation.utils")
_IMPORTED_PLAIN += tuple(
    f"transformers.models.{name}" for name in ("auto.modeling_auto", "deepseek_v3.modeling_deepseek_v3")
)


def _preload(names: Sequence[str]) -> None:
    faulthandler.enable()
    for name in names:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    if "deepspeed" in sys.modules:
        # DeepSpeed asks three times for an optimizer on the CPU, and each answer takes a process of more than a second.
        cpuinfo = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()
        importlib.import_module("tests.verifying").verify_in_forks()
    gc.collect()
    # Forks share these pages as long as nobody counts or moves what is on them.
    gc.freeze()


def _serve() -> None:
    """Fork what is asked for at the socket, and write down how it ended, until standard input closes."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    asked.bind(sys.argv[1])
    # Not every session needs forks.
    select.select([0, asked], [], [])
    _preload(_IMPORTED_PLAIN if sys.argv[2:] == ["plain"] else _IMPORTED)
    folders: dict[int, Path] = {}
    while True:
        ready = select.select([0, asked], [], [], 0.01 if folders else None)[0]
        if 0 in ready:
            return
        if asked in ready:
            sent, outputs, _, _ = socket.recv_fds(asked, 1 << 20, 2)
            _start(json.loads(sent) | {"outputs": outputs}, folders)
            for number in outputs:
                os.close(number)
        while folders and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _write(folders.pop(ended[0]) / "code", os.waitstatus_to_exitcode(ended[1]))


def _start(request: dict[str, Any], folders: dict[int, Path]) -> None:
    folder = Path(request["folder"])
    pid = _fork(lambda: _launch(request))
    folders[pid] = folder
    _write(folder / "pid", pid)


def _write(path: Path, number: int) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(str(number))
    partial.rename(path)


def _launch(request: dict[str, Any]) -> None:
    """Be the launcher: start the ranks, pass signals on to them, and end the others once one has failed."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    outputs = request.get("outputs") or [os.open(request[name], flags) for name in ("out", "err")]
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not request["ranks"]:
        _become(request, {})
        return
    size = str(request["ranks"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pids: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: _signal(pids, number))
    for rank in range(request["ranks"]):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pids.append(_fork(lambda given=given: _become(request, given, is_rank=True)))
        _write(Path(request["folder"]) / f"rank-{rank}", pids[-1])
    sys.exit(_wait(pids))


def _wait(pids: list[int]) -> int:
    """1 where a rank has failed, after the others have ended too."""
    failed = 0.0
    has_failed = False
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            pids.remove(pid)
            if status:
                sys.stderr.write(f"process {pid} exitcode  : {os.waitstatus_to_exitcode(status)}\n")
            has_failed = has_failed or status != 0
            if has_failed and not failed:
                failed = time.monotonic()
                _signal(pids, signal.SIGTERM)
        elif failed and time.monotonic() - failed > GRACE_SECONDS:
            _signal(pids, signal.SIGKILL)
        time.sleep(0.005)
    return int(has_failed)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _fork(child: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        child()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:  # noqa: BLE001 - the end of a process
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(request: dict[str, Any], given: Mapping[str, str], *, is_rank: bool = False) -> None:
    """Be the process that a launcher would have started, in a session of its own if it is one of several."""
    if is_rank:
        os.setsid()
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environ"] | given)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        # torch reads this when it is imported, which it is here.
        sys.modules["torch"].compiler.set_stance("force_eager")
    # torch makes its thread pool anew at the first use after a fork, and aborts the process where two of its threads come
    # first at once ("Invalid thread pool!"), as some runs of torch's builds for CUDA did in their first backward.
    torch = sys.modules["torch"]
    torch.set_num_threads(torch.get_num_threads())
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    program = [str(os.getppid()) if word == PARENT else word for word in request["program"]]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        if "deepspeed" in sys.modules:
            sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
    atexit._run_exitfuncs()


if __name__ == "__main__":
    _serve()
