"""The server process: `python -m ds_finetune.serving.server_process FOLDER ...` runs the HTTP application.

`ds-finetune serve` starts it for the engines transformers and onnx; for vLLM it starts `vllm serve`.
"""

import argparse
import os
from contextlib import suppress
from pathlib import Path

import uvicorn

from ds_finetune.serving.http_app import make_app
from ds_finetune.serving.http_guard import BoundedProtocol, HostCheck, HostRules
from ds_finetune.serving.request_queue import QueueLimits, RequestQueue
from ds_finetune.serving.serve import API_KEY

_SHUTDOWN_SECONDS = 2
"""How long connections may still send and receive when the last answer has ended."""


class AnsweringServer(uvicorn.Server):
    """After a signal it still listens, and refuses requests with status 503, until the current answer has ended."""

    def __init__(self, config: uvicorn.Config, queue: RequestQueue) -> None:
        super().__init__(config)
        self._queue = queue

    async def on_tick(self, counter: int) -> bool:
        """Whether the server ends now; called ten times a second."""
        if not await super().on_tick(counter):
            return False
        self._queue.close()
        return self._queue.is_idle or self.force_exit


def main() -> None:
    """Serve the folder until a signal."""

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--queue", type=int, required=True)
    parser.add_argument("--request-seconds", type=float, required=True)
    parser.add_argument("--allow-host", action="append", default=[])
    arguments = parser.parse_args()
    limits = QueueLimits(arguments.queue, arguments.request_seconds)
    app = make_app(arguments.folder, limits, device=arguments.device, api_key=os.environ.get(API_KEY, ""))
    config = uvicorn.Config(
        HostCheck(app, HostRules(arguments.host, allowed=tuple(arguments.allow_host))),
        host=arguments.host,
        port=arguments.port,
        http=BoundedProtocol,
        ws="none",
        log_level="info",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with suppress(KeyboardInterrupt):
        AnsweringServer(config, app.state.queue).run()


if __name__ == "__main__":
    main()
