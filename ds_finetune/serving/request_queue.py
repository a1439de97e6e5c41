"""The queue of requests: one is answered at a time, and its generation ends when its client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_finetune.serving.openai_request import RequestError

_POLL_SECONDS = 0.01
_CLOSING_SECONDS = 3.0
"""How long an answer may still take when the server stops."""
_STOPPING = "the server is stopping"


class GenerationStoppedError(RuntimeError):
    """Raised inside a model's forward to end a generation."""


class GenerationStopper:
    """Ends the generation of a model from another thread, before its next decoder layer.

    The check in every layer also ends the forward of a long prompt.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reason = ""
        self._options = getattr(model, "run_options", None)
        layers = (layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part)
        for module in (model, *layers):
            module.register_forward_pre_hook(self._check)

    def stop(self, reason: str) -> None:
        """End the current generation; further ones also end at once, until `clear`."""
        self.reason = reason
        self._set_terminate(terminate=True)

    def clear(self) -> None:
        """Allow generations again."""
        self.reason = ""
        self._set_terminate(terminate=False)

    def _set_terminate(self, *, terminate: bool) -> None:
        # A forward of ONNX Runtime is one call, which checks this flag between its operators.
        if self._options is not None:
            self._options.terminate = terminate

    def _check(self, *_: Any) -> None:  # noqa: ANN401 - a module and its inputs
        if self.reason:
            raise GenerationStoppedError(self.reason)


@dataclass(frozen=True)
class QueueLimits:
    """How many requests may wait while one is answered, and how long a request may take, including its wait."""

    queue: int
    request_seconds: float


class RequestQueue:
    """Answers one request after another, in the order of arrival; awaiting `idle()` waits until the model is idle."""

    def __init__(self, limits: QueueLimits, stopper: GenerationStopper, idle: Callable[[], Awaitable[Any]]) -> None:
        self._limits, self._stopper, self._idle = limits, stopper, idle
        self._waiting: list[object] = []
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is answered."""
        return not self._waiting

    def close(self) -> None:
        """Refuse the requests that wait and all later ones (503), and stop the current answer after a few seconds."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().call_later(_CLOSING_SECONDS, self._stopper.stop, _STOPPING)

    def check_room(self) -> None:
        """RequestError with status 429 where the queue is full, and 503 where it is closed."""
        if self._is_closed:
            raise _stopping()
        waiting = len(self._waiting) - 1
        if waiting >= self._limits.queue:
            message = f"{waiting} requests wait, and --queue is {self._limits.queue}: send the request again later"
            raise RequestError(429, message, code="queue_full")

    async def run(
        self, answer: Callable[[], Coroutine[Any, Any, None]], disconnected: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `answer` when the earlier requests are done, and stop it when `disconnected` returns.

        RequestError where the queue is full (429) or closed (503), or the request takes too long (504).
        """
        self.check_room()
        request = object()
        self._waiting.append(request)
        client_left = asyncio.create_task(disconnected())
        until = asyncio.get_running_loop().time() + self._limits.request_seconds
        try:
            if await self._wait(request, client_left, until):
                await self._answer(asyncio.create_task(answer()), client_left, until)
        finally:
            client_left.cancel()
            self._waiting.remove(request)

    async def _wait(self, request: object, client_left: "asyncio.Task[None]", until: float) -> bool:
        """Wait until the request is first; false where its client disconnects before."""
        while self._waiting[0] is not request:
            await asyncio.wait({client_left}, timeout=_POLL_SECONDS)
            if client_left.done():
                return False
            if self._is_closed:
                raise _stopping()
            if asyncio.get_running_loop().time() > until:
                raise self._too_long()
        return True

    async def _answer(self, answer: "asyncio.Task[None]", client_left: "asyncio.Task[None]", until: float) -> None:
        """Wait for `answer`, and stop the model if the client disconnects or the time is over.

        Returns when the model is idle.
        """
        seconds_left = until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({answer, client_left}, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_stopped = not answer.done()
            if is_stopped:
                self._stopper.stop("the client disconnected" if client_left.done() else str(self._too_long()))
        await asyncio.wait({answer})
        await self._idle()
        is_cut_off = self._stopper.reason == _STOPPING
        self._stopper.clear()
        error = answer.exception()
        if error is not None and is_cut_off:
            raise _stopping()
        if error is not None and not is_stopped:
            raise error
        if error is not None and not client_left.done():
            raise self._too_long()

    def _too_long(self) -> RequestError:
        return RequestError(
            504,
            f"the request took more than --request-seconds {self._limits.request_seconds:g}",
            code="request_timeout",
        )


def _stopping() -> RequestError:
    return RequestError(503, _STOPPING, code="server_stopping")
