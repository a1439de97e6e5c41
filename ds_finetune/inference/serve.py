"""An OpenAI-compatible endpoint over an exported folder, by servers that exist: started, waited for, stopped."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ds_finetune.errors import ServeError
from ds_finetune.export.verify.record import UNVERIFIED, is_onnx
from ds_finetune.model.folder_check import check_folder

ENGINES = ("vllm", "transformers", "onnx")
_SERVING = ("fastapi", "uvicorn", "pydantic", "openai")
"""What `transformers serve` imports (transformers 5.23, utils/import_utils.py:972)."""
QUEUE, REQUEST_SECONDS = 16, 600.0
"""Requests that wait at most, and seconds of a request at most, where the command line does not say."""
_POLL_SECONDS = 0.3
_STOP_SECONDS = 30.0
"""How long a server may take to end what it is doing."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """How this machine reaches it."""
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{here}]' if ':' in here else here}:{self.port}"


@dataclass(frozen=True)
class ServeOptions:
    """How a folder is served: `engine` is one of `ENGINES` or `auto`.

    `queue` and `request_seconds` are those of transformers and ONNX alone.
    """

    engine: str = "auto"
    ready_seconds: float = 1800.0
    queue: int | None = None
    request_seconds: float | None = None

    def resolve(self, folder: Path) -> "ServeOptions":
        """The same with its engine chosen and its limits filled in; ServeError where they do not fit together."""
        engine = choose_engine(self.engine, folder)
        given = {"--queue": self.queue, "--request-seconds": self.request_seconds}
        named = [f"{name} {value:g}" for name, value in given.items() if value is not None]
        if engine == "vllm" and named:
            raise ServeError(
                f"{named[0]} is not valid with --engine vllm", hint="leave it out: vLLM has a queue of its own"
            )
        wrong = [f"{name} {value:g}" for name, value in given.items() if value is not None and value <= 0]
        if wrong:
            example = f"e.g. --queue {QUEUE} --request-seconds {REQUEST_SECONDS:g}"
            raise ServeError(f"{wrong[0]} is not more than 0", hint=example)
        seconds = self.request_seconds or REQUEST_SECONDS
        return replace(self, engine=engine, queue=self.queue or QUEUE, request_seconds=seconds)


def serve(folder: Path, address: Address, service: ServeOptions, *, say: Callable[[str], None]) -> None:
    """Serve `folder` until SIGINT or SIGTERM, and leave no process behind.

    ServeError where the folder, the engine or the address cannot be used, where the server ends by itself, and
    where it is not healthy after `service.ready_seconds`.
    """
    if not (folder / "config.json").is_file():
        raise ServeError(f"`{folder}` holds no config.json", hint="name an exported folder, e.g. runs/r1/export")
    check_folder(folder)
    chosen = service.resolve(folder)
    if chosen.engine != "vllm":
        from ds_finetune.export.load import check_loadable

        check_loadable(folder)
    _check_free(address)
    if (folder / UNVERIFIED).is_file():
        say(f"{folder} is UNVERIFIED: {(folder / UNVERIFIED).read_text(encoding='utf-8').strip()}")
    for line in _limits(chosen):
        say(line)
    with (
        tempfile.TemporaryDirectory() as cache,
        _asked_to_stop() as asked,
        _running(server_command(chosen, folder, address), cache) as server,
    ):
        _await_health(server, address, asked, chosen.ready_seconds)
        if not asked:
            say(f"ready: {address.url}/v1, model `{folder}`, by {chosen.engine}; Ctrl-C ends it")
        while not asked:
            _refuse_end(server)
            time.sleep(_POLL_SECONDS)
    say("stopped")


def _limits(service: ServeOptions) -> list[str]:
    """What a person has to know of an engine that answers one request at a time."""
    if service.engine == "vllm":
        return []
    return [
        f"--engine {service.engine} answers one request at a time: {service.queue} more may wait,"
        f" each for {service.request_seconds:g} s at most; for real traffic install vLLM and take --engine vllm"
    ]


def choose_engine(engine: str, folder: Path) -> str:
    """`auto` is ONNX Runtime for an ONNX folder, for others vLLM where it is installed and there is a GPU, else
    `transformers serve`.

    ServeError where the engine is not installed or does not read such a folder.
    """
    if engine == "auto" and is_onnx(folder):
        engine = "onnx"
    if engine == "auto":
        engine = "vllm" if shutil.which("vllm") and _has_gpu() else "transformers"
    if (engine == "onnx") != is_onnx(folder):
        kind, way = (
            ("an ONNX folder", "take --engine onnx")
            if engine != "onnx"
            else ("no ONNX folder", "make one: ds-finetune export --format onnx")
        )
        raise ServeError(f"--engine {engine}: `{folder}` is {kind}", hint=way)
    if engine == "vllm" and not shutil.which("vllm"):
        raise ServeError(
            f"--engine {engine}: there is no `vllm` on the path", hint="pip install vllm, or take --engine transformers"
        )
    needed = {"vllm": (), "transformers": _SERVING, "onnx": (*_SERVING, "onnxruntime")}[engine]
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        raise ServeError(
            f"--engine {engine} needs {', '.join(absent)}",
            hint=f"pip install 'ds_finetune[serve{',onnx' if engine == 'onnx' else ''}]'",
        )
    return engine


def server_command(service: ServeOptions, folder: Path, address: Address) -> list[str]:
    """The command that serves `folder` under its own path as the model's name."""
    where = ["--host", address.host, "--port", str(address.port)]
    if service.engine == "vllm":
        return ["vllm", "serve", str(folder), "--served-model-name", str(folder), *where]
    device = "auto" if service.engine == "transformers" and _has_gpu() else "cpu"
    limits = ["--queue", str(service.queue), "--request-seconds", str(service.request_seconds)]
    return [
        sys.executable,
        "-m",
        "ds_finetune.inference.server_process",
        str(folder),
        "--device",
        device,
        *limits,
        *where,
    ]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_free(address: Address) -> None:
    """ServeError where something listens there already, or the address is not this machine's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as taken:
        raise ServeError(
            f"cannot listen on {address.host} port {address.port}: {taken}", hint="name another --port or --host"
        ) from taken


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that holds the signals SIGINT and SIGTERM once they have come."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _running(command: list[str], cache: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A server in a session of its own, so that the terminal's Ctrl-C reaches it once, through here; at the end nothing
    of the session is left.
    """
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
    server = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        yield server
    finally:
        _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Ask the server to end, wait, and kill what is left of its group."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _await_health(server: "subprocess.Popen[bytes]", address: Address, asked: list[int], ready_seconds: float) -> None:
    began = time.monotonic()
    while not asked and not _is_healthy(address):
        _refuse_end(server)
        if time.monotonic() - began > ready_seconds:
            raise ServeError(
                f"{address.url}/health does not answer after {ready_seconds:.0f} s",
                hint="raise --ready-seconds for a large model",
            )
        time.sleep(_POLL_SECONDS)


def _is_healthy(address: Address) -> bool:
    try:
        with urllib.request.urlopen(f"{address.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _refuse_end(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is not None:
        raise ServeError(
            f"the server ended by itself with exit code {server.returncode}", hint="its own lines above say why"
        )
