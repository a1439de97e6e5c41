"""Starts an HTTP server for the model in an exported folder, waits until it is healthy, and stops it.

The server is vLLM, or this package's own (`http_app`).
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from ds_finetune.data.prompt_format import GENERATION
from ds_finetune.errors import ServeError
from ds_finetune.export.formats import format_of, formats
from ds_finetune.export.load import check_loadable, holds_classifier
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.model.build.hub_folder import check_folder
from ds_finetune.system.processes import handle_signals, python_module, with_package
from ds_finetune.system.versions import check_versions

_SERVING = ("fastapi", "uvicorn", "pydantic", "openai")
"""Packages that `transformers serve` imports (transformers 5.23, utils/import_utils.py:972)."""
API_KEY = "DS_FINETUNE_API_KEY"
"""Environment variable with the API key of requests. Other users of the machine could read a command-line option."""
QUEUE, REQUEST_SECONDS = 16, 600.0
"""Default values of the options --queue and --request-seconds of `ds-finetune serve`."""
_POLL_SECONDS = 0.3
_STOP_SECONDS = 30.0
"""Seconds that a server may take to end after it was told to."""


@dataclass(frozen=True)
class Address:
    """Address on which a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """URL of the server as seen from this host."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True)
class ServeOptions:
    """Options of `ds-finetune serve`: `engine` is auto, vllm, transformers or onnx.

    `queue`, `request_seconds` and `allowed_hosts` are only for the engines transformers and onnx; None means the
    default. Requests may name the server by its address, by the names of this machine, and by `allowed_hosts`. With
    `no_api_key`, other machines may send requests without a key.
    """

    engine: str = "auto"
    ready_seconds: float = 1800.0
    queue: int | None = None
    request_seconds: float | None = None
    allowed_hosts: tuple[str, ...] = ()
    no_api_key: bool = False
    adapter: Path | None = None
    """Folder of a LoRA adapter, which vLLM serves as a second model beside the base model."""

    def resolve(self, folder: Path) -> "ServeOptions":
        """Choose the serving engine and fill in defaults; ServeError where options are not valid together."""
        engine = choose_engine(self.engine, folder)
        limits = {"--queue": self.queue, "--request-seconds": self.request_seconds}
        named = [f"{name} {value:g}" for name, value in limits.items() if value is not None]
        if engine == "vllm" and named:
            raise ServeError(f"{named[0]} is not valid with --engine vllm", hint="leave it out: vLLM has its own queue")
        if engine == "vllm" and self.allowed_hosts:
            raise ServeError(
                f"--allow-host {self.allowed_hosts[0]} is not valid with --engine vllm",
                hint="leave it out: vLLM answers whatever the Host header names",
            )
        if engine != "vllm" and self.adapter:
            raise ServeError(
                f"--adapter {self.adapter} is not valid with --engine {engine}",
                hint=f"merge it: ds-finetune export {self.adapter} OUT --base {folder}, and serve OUT",
            )
        wrong = [f"{name} {value:g}" for name, value in limits.items() if value is not None and value <= 0]
        if wrong:
            example = f"e.g. --queue {QUEUE} --request-seconds {REQUEST_SECONDS:g}"
            raise ServeError(f"the option {wrong[0]} must be more than 0", hint=example)
        seconds = self.request_seconds or REQUEST_SECONDS
        return replace(self, engine=engine, queue=self.queue or QUEUE, request_seconds=seconds)


def serve(folder: Path, address: Address, options: ServeOptions, *, show: Callable[[str], None]) -> None:
    """Serve the model in `folder` until SIGINT, SIGTERM or SIGHUP, then end all processes of the server.

    ServeError where the folder, the engine or the address cannot be used, where the server ends by itself, and where it
    is not healthy after `options.ready_seconds`.
    """
    if not (folder / "config.json").is_file():
        raise ServeError(f"`{folder}` has no config.json", hint="name an exported folder, e.g. runs/r1/export")
    check_folder(folder)
    resolved = options.resolve(folder)
    if resolved.engine != "vllm":
        check_loadable(folder)
    if holds_classifier(folder):
        raise ServeError(
            f"`{folder}` holds a classifier, which generates no text",
            hint="`ds-finetune ask` prints the classes of texts; servers for classifiers are vLLM's and transformers'",
        )
    _check_address(address, no_api_key=options.no_api_key)
    if (folder / UNVERIFIED).is_file():
        show(f"{folder} is UNVERIFIED: {(folder / UNVERIFIED).read_text(encoding='utf-8').strip()}")
    if resolved.engine != "vllm":
        show(
            f"--engine {resolved.engine} answers one request at a time: {resolved.queue} more may wait,"
            f" each for {resolved.request_seconds:g} s at most; for more traffic install vLLM and use --engine vllm"
        )
    signals: list[int] = []
    with (
        tempfile.TemporaryDirectory() as cache,
        handle_signals(signals.append),
        _start_server(
            [*server_command(resolved, folder, address), *_adapter_arguments(resolved, folder, cache)], cache
        ) as server,
    ):
        began = time.monotonic()
        while not signals and not _is_healthy(address):
            _check_running(server)
            if time.monotonic() - began > resolved.ready_seconds:
                raise ServeError(
                    f"{address.url}/health does not answer after {resolved.ready_seconds:.0f} s",
                    hint="raise --ready-seconds for a large model",
                )
            time.sleep(_POLL_SECONDS)
        if not signals:
            adapted = f" or `{options.adapter}`" if options.adapter else ""
            show(f"ready: {address.url}/v1, model `{folder}`{adapted}, by {resolved.engine}; Ctrl-C ends it")
        while not signals:
            _check_running(server)
            time.sleep(_POLL_SECONDS)
    show("stopped")


def choose_engine(engine: str, folder: Path) -> str:
    """Choose the engine that serves the model in a folder.

    `auto` is the first engine for the folder's format. vllm is passed over if it is not installed or no GPU exists.
    ServeError where the engine is not installed or cannot read the folder.
    """
    row = format_of(folder)
    row.check_runs_here(folder)
    if engine == "auto":
        engine = next(name for name in row.engines if name != "vllm" or (shutil.which("vllm") and _has_gpu()))
    if engine not in row.engines:
        others = " or ".join(other.name for other in formats() if engine in other.engines)
        raise ServeError(
            f"--engine {engine} reads {others} folders, and `{folder}` is one of {row.title}",
            hint=f"use --engine {' or '.join(row.engines)}, or make one: ds-finetune export --format {others}",
        )
    if engine == "vllm" and not shutil.which("vllm"):
        raise ServeError(
            f"--engine {engine} needs the command `vllm`, which is not on the path",
            hint="pip install vllm==0.32.0, or use --engine transformers",
        )
    absent = [name for name in (*_SERVING, *row.packages) if engine != "vllm" and find_spec(name) is None]
    if absent:
        extras = ",".join(filter(None, ("serve", row.extra)))
        raise ServeError(f"--engine {engine} needs {', '.join(absent)}", hint=f"pip install 'ds_finetune[{extras}]'")
    if engine != "vllm":
        check_versions("serve")
    return engine


def server_command(options: ServeOptions, folder: Path, address: Address) -> list[str]:
    """Command that starts the server. Requests name the model by the path of `folder`."""
    listen = ["--host", address.host, "--port", str(address.port)]
    if options.engine == "vllm":
        return ["vllm", "serve", str(folder), "--served-model-name", str(folder), *listen]
    device = "auto" if options.engine == "transformers" and _has_gpu() else "cpu"
    limits = ["--queue", str(options.queue), "--request-seconds", str(options.request_seconds)]
    hosts = [f"--allow-host={name}" for name in options.allowed_hosts]
    program = python_module("ds_finetune.serving.http_app", str(folder))
    return [*program, "--device", device, *limits, *hosts, *listen]


def _adapter_arguments(options: ServeOptions, folder: Path, cache: str) -> list[str]:
    """Write a LoRA adapter to `cache` under the parameter names that vLLM expects. Returns vLLM's arguments for it.
    ExportError where the adapter does not fit the model in `folder`, or vLLM would ignore a part of it.
    """
    if options.adapter is None:
        return []
    from ds_finetune.export.formats import ADAPTER, ExportOptions
    from ds_finetune.export.server_adapter import served_rank

    out = Path(cache) / "adapter"
    ADAPTER.load().write(options.adapter, out, ADAPTER.resolved(ExportOptions(base=folder)))
    given = ["--lora-modules", f"{options.adapter}={out}"]
    # vLLM serves the adapter's tokenizer and generation config: training used their chat template and end tokens.
    given += ["--tokenizer", str(out)] if (out / "tokenizer_config.json").is_file() else []
    given += ["--generation-config", str(out)] if (out / GENERATION).is_file() else []
    return ["--enable-lora", "--max-lora-rank", str(served_rank(out)), *given]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_address(address: Address, *, no_api_key: bool) -> None:
    """Raise ServeError where the address cannot be used, or other machines could send requests to it without a key."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, socket_address = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket_address)
    except OSError as taken:
        raise ServeError(
            f"cannot listen on {address.host} port {address.port}: {taken}", hint="name another --port or --host"
        ) from taken
    is_reachable = not all(ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in infos)
    if is_reachable and not no_api_key and not os.environ.get(API_KEY):
        raise ServeError(
            f"--host {address.host} lets other machines send requests, and {API_KEY} is not set",
            hint=f"export {API_KEY}=$(openssl rand -hex 32), or add --no-api-key where something else checks who asks",
        )


@contextmanager
def _start_server(command: list[str], cache: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the server in a session of its own, and end all its processes afterwards. In the terminal's session, the
    server would get the SIGINT of Ctrl-C twice: from the terminal and from this process.
    """
    environ = with_package(os.environ) | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
    if API_KEY in environ:
        environ["VLLM_API_KEY"] = environ[API_KEY]
    server = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        yield server
    finally:
        if server.poll() is None:
            # SIGTERM is sent, since SIGINT during the server's imports would print a traceback.
            server.terminate()
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _is_healthy(address: Address) -> bool:
    try:
        with urllib.request.urlopen(f"{address.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _check_running(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is not None:
        raise ServeError(
            f"the server ended with exit code {server.returncode}", hint="the reason is in its output above"
        )
