"""The server process: `python -m ds_finetune.inference.server_process FOLDER ...` runs the HTTP application.

`ds-finetune serve` starts it for the engines transformers and onnx; for vLLM it starts `vllm serve`.
"""

import argparse
from pathlib import Path

_SHUTDOWN_SECONDS = 5
"""How long the request that is being answered may still take after a signal."""


def main() -> None:
    """Serve the folder until a signal."""
    import uvicorn

    from ds_finetune.inference.http_app import make_app
    from ds_finetune.inference.http_guard import BoundedProtocol, HostCheck, HostRules
    from ds_finetune.inference.request_queue import QueueLimits

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--queue", type=int, required=True)
    parser.add_argument("--request-seconds", type=float, required=True)
    parser.add_argument("--allow-host", action="append", default=[])
    arguments = parser.parse_args()
    app = make_app(arguments.folder, QueueLimits(arguments.queue, arguments.request_seconds), device=arguments.device)
    uvicorn.run(
        HostCheck(app, HostRules(arguments.host, allowed=tuple(arguments.allow_host))),
        host=arguments.host,
        port=arguments.port,
        http=BoundedProtocol,
        ws="none",
        log_level="info",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


if __name__ == "__main__":
    main()
