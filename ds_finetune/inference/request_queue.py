"""One answer at a time: who waits, how long, and how a generation is ended whose client has gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_finetune.inference.openai_request import RequestError

_POLL_SECONDS = 0.01


class GenerationStoppedError(RuntimeError):
    """Raised inside a model's forward to end a generation."""


class GenerationStopper:
    """Ends the generation of a model from another thread: before the next decoder layer, so a long prompt ends too."""

    def __init__(self, model: nn.Module) -> None:
        self.reason = ""
        self._options = getattr(model, "run_options", None)
        layers = (layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part)
        for module in (model, *layers):
            module.register_forward_pre_hook(self._check)

    def stop(self, reason: str) -> None:
        """End the generation that runs; every further one ends at once until `clear`."""
        self.reason = reason
        self._terminate(asked=True)

    def clear(self) -> None:
        """Let generations run again."""
        self.reason = ""
        self._terminate(asked=False)

    def _terminate(self, *, asked: bool) -> None:
        # A forward of ONNX Runtime is one call, which looks at this flag between its operators.
        if self._options is not None:
            self._options.terminate = asked

    def _check(self, *_: Any) -> None:  # noqa: ANN401 - a module and its inputs
        if self.reason:
            raise GenerationStoppedError(self.reason)


@dataclass(frozen=True)
class QueueLimits:
    """How many requests wait at most while one is answered, and how long a request may take with its wait."""

    queue: int
    request_seconds: float


class RequestQueue:
    """Answers one request after another in the order of arrival; `idle` returns when the model has nothing to do."""

    def __init__(self, limits: QueueLimits, stopper: GenerationStopper, idle: Callable[[], Awaitable[Any]]) -> None:
        self._limits, self._stopper, self._idle = limits, stopper, idle
        self._line: list[object] = []

    def check_room(self) -> None:
        """RequestError where as many wait as may."""
        waiting = len(self._line) - 1
        if waiting >= self._limits.queue:
            message = f"{waiting} requests wait, and --queue is {self._limits.queue}: ask again later"
            raise RequestError(429, message, code="queue_full")

    async def run(
        self, answer: Callable[[], Coroutine[Any, Any, None]], gone: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `answer` when its turn comes, until `gone` returns; RequestError where there is no room or no time."""
        self.check_room()
        place = object()
        self._line.append(place)
        left = asyncio.create_task(gone())
        until = asyncio.get_running_loop().time() + self._limits.request_seconds
        try:
            if await self._wait(place, left, until):
                await self._run(asyncio.create_task(answer()), left, until)
        finally:
            left.cancel()
            self._line.remove(place)

    async def _wait(self, place: object, gone: "asyncio.Task[None]", until: float) -> bool:
        """Whether it is this request's turn; false where its client has gone."""
        while self._line[0] is not place:
            await asyncio.wait({gone}, timeout=_POLL_SECONDS)
            if gone.done():
                return False
            if asyncio.get_running_loop().time() > until:
                raise self._too_long()
        return True

    async def _run(self, answer: "asyncio.Task[None]", gone: "asyncio.Task[None]", until: float) -> None:
        """Wait for `answer`; stop the model where the client goes or the time is over. Returns when it is idle."""
        left = until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({answer, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_cut = not answer.done()
            if is_cut:
                self._stopper.stop("the client has gone" if gone.done() else str(self._too_long()))
        await asyncio.wait({answer})
        await self._idle()
        self._stopper.clear()
        error = answer.exception()
        if error is not None and not is_cut:
            raise error
        if error is not None and not gone.done():
            raise self._too_long()

    def _too_long(self) -> RequestError:
        return RequestError(
            504,
            f"the request took more than --request-seconds {self._limits.request_seconds:g}",
            code="request_timeout",
        )
