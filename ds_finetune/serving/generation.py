"""Generates answers one at a time: queues requests, stops a generation, and decodes its text.

A generation stops when the client disconnects. A text ends before the first stop text.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria
from transformers.cli.serving.utils import (
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
    response_events_to_chunks,
)

from ds_finetune.foreign.guard import Foreign
from ds_finetune.serving.openai_request import RequestError

_POLL_SECONDS = 0.01
_CLOSING_SECONDS = 3.0
"""Seconds that the current answer may still take after the server was told to stop."""
_STOPPING = "the server is stopping"
_DECODING = Foreign("transformers", "cli/serving/utils.py:476, DirectStreamer")
_INCOMPLETE = "\ufffd"
"""Replacement character, to which a tokenizer decodes an incomplete or invalid UTF-8 sequence."""


class GenerationStoppedError(RuntimeError):
    """Raised inside a model's forward pass to end a generation."""


class GenerationStopper:
    """Ends a generation from another thread, also within a forward pass: each decoder layer checks whether to stop."""

    def __init__(self, model: nn.Module) -> None:
        self.reason = ""
        self._options = getattr(model, "run_options", None)
        layers = (layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part)
        for module in (model, *layers):
            module.register_forward_pre_hook(self._check)

    def stop(self, reason: str) -> None:
        """End the current generation, and any that starts before `clear` is called."""
        self._set(reason)

    def clear(self) -> None:
        """Allow generations again after `stop`."""
        self._set("")

    def _set(self, reason: str) -> None:
        self.reason = reason
        # ONNX Runtime runs a forward pass as one call, which checks `terminate` between operators.
        if self._options is not None:
            self._options.terminate = bool(reason)

    def _check(self, *_: Any) -> None:  # noqa: ANN401 - a module and its inputs
        if self.reason:
            raise GenerationStoppedError(self.reason)


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the server: waiting requests, and seconds from a request's arrival to its answer's end."""

    queue: int
    request_seconds: float


class RequestQueue:
    """Answers requests one at a time in the order of arrival. `await idle()` returns when the model is idle."""

    def __init__(self, limits: QueueLimits, stopper: GenerationStopper, idle: Callable[[], Awaitable[Any]]) -> None:
        self._limits, self._stopper, self._idle = limits, stopper, idle
        self._waiting: list[object] = []
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or being answered."""
        return not self._waiting

    def close(self) -> None:
        """Refuse waiting and later requests with status 503, and stop the current answer after a few seconds."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().call_later(_CLOSING_SECONDS, self._stopper.stop, _STOPPING)

    def check_room(self) -> None:
        """Raise RequestError with status 429 if the queue of requests is full, and 503 if it is closed."""
        if self._is_closed:
            raise _stopping()
        waiting = len(self._waiting) - 1
        if waiting >= self._limits.queue:
            message = f"{waiting} requests wait, and --queue is {self._limits.queue}: send the request again later"
            raise RequestError(429, message, code="queue_full")

    async def run(
        self, answer: Callable[[], Coroutine[Any, Any, None]], disconnected: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `answer` when all earlier requests are done; stop it if `disconnected` returns, since the client has
        left.

        RequestError where the queue is full (429) or closed (503), or the request takes too long (504).
        """
        self.check_room()
        request = object()
        self._waiting.append(request)
        disconnection = asyncio.create_task(disconnected())
        until = asyncio.get_running_loop().time() + self._limits.request_seconds
        try:
            if await self._wait(request, disconnection, until):
                await self._answer(asyncio.create_task(answer()), disconnection, until)
        finally:
            disconnection.cancel()
            self._waiting.remove(request)

    async def _wait(self, request: object, disconnection: "asyncio.Task[None]", until: float) -> bool:
        """Wait until this request is first in the queue; false if its client disconnects before that."""
        while self._waiting[0] is not request:
            await asyncio.wait({disconnection}, timeout=_POLL_SECONDS)
            if disconnection.done():
                return False
            if self._is_closed:
                raise _stopping()
            if asyncio.get_running_loop().time() > until:
                raise self._too_long()
        return True

    async def _answer(self, answer: "asyncio.Task[None]", disconnection: "asyncio.Task[None]", until: float) -> None:
        """Wait until `answer` has ended and the model is idle; stop it if the client disconnects or time is over."""
        remaining = until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({answer, disconnection}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_stopped = not answer.done()
            if is_stopped:
                self._stopper.stop("the client disconnected" if disconnection.done() else str(self._too_long()))
        await asyncio.wait({answer})
        await self._idle()
        is_cut_off = self._stopper.reason == _STOPPING
        self._stopper.clear()
        error = answer.exception()
        if error is not None and is_cut_off:
            raise _stopping()
        if error is not None and not is_stopped:
            raise error
        if error is not None and not disconnection.done():
            raise self._too_long()

    def _too_long(self) -> RequestError:
        text = f"the request took more than --request-seconds {self._limits.request_seconds:g}"
        return RequestError(504, text, code="request_timeout")


def _stopping() -> RequestError:
    return RequestError(503, _STOPPING, code="server_stopping")


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Index at which to cut an answer: the start of the stop text that ends first (if several, the longest)."""
    spans = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(spans)[1] if spans else None


class AnswerText:
    """Decodes the tokens of an answer one by one, and cuts the text before the first stop text.

    It replaces the `DecodeStream` of tokenizers 0.23, which fails if a byte makes the bytes before it invalid.
    """

    def __init__(self, stops: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._stops, self._skip = stops, skip_special_tokens
        self._ids: list[int] = []
        self._begin = self._end = 0
        self._unsent = ""
        self.is_stopped = False

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """Add a token of the answer. Returns the new text that later tokens cannot change, or None."""
        self._ids.append(token)
        text = self._undecoded(tokenizer)
        if not text or text.endswith(_INCOMPLETE):
            return None
        self._begin, self._end = self._end, len(self._ids)
        return self._release(text) or None

    def finish(self, tokenizer: Tokenizer) -> str:
        """End of the answer's text, which was held back because it could have begun a stop text."""
        text = self._release(self._undecoded(tokenizer))
        return text if self.is_stopped else text + self._unsent

    def _undecoded(self, tokenizer: Tokenizer) -> str:
        """Text of tokens not yet decoded. Earlier tokens are decoded too, because decoding may drop a first space."""
        before = tokenizer.decode(self._ids[self._begin : self._end], skip_special_tokens=self._skip)
        return str(tokenizer.decode(self._ids[self._begin :], skip_special_tokens=self._skip)[len(before) :])

    def _release(self, text: str) -> str:
        """Append `text` to the held-back text, and return the part of it that cannot begin a stop text."""
        if self.is_stopped:
            return ""
        self._unsent += text
        end = stop_position(self._unsent, self._stops)
        self.is_stopped = end is not None
        if end is None:
            size = len(self._unsent)
            starts = (at for at in range(size) if any(stop.startswith(self._unsent[at:]) for stop in self._stops))
            end = next(starts, size)
        released, self._unsent = self._unsent[:end], self._unsent[end:]
        return released


class AnswerStreamer(DirectStreamer):
    """A streamer for `transformers serve` that decodes with an `AnswerText`."""

    def __init__(self, text: AnswerText, settings: GenerationConfig, tokenizer: Tokenizer, *given: Any) -> None:  # noqa: ANN401
        super().__init__(tokenizer, *given)
        _DECODING.attribute(self, "_decode_stream")
        self._decode_stream, self._settings = text, settings

    def end(self) -> None:
        """Send the rest of the answer's text, then end the stream."""
        rest = self._decode_stream.finish(self._tokenizer)
        items = [rest] if self._parser is None else response_events_to_chunks(self._parser.feed(rest))
        for item in items if rest else []:
            self._enqueue(item)
        if self._decode_stream.is_stopped:
            # With max_new_tokens, transformers could report "length" for a text that was cut at a stop text
            # (cli/serving/chat_completion.py:257, 301).
            self._settings.max_new_tokens = None
        super().end()


class _StopCriterion(StoppingCriteria):
    def __init__(self, text: AnswerText) -> None:
        self._text = text

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((len(input_ids),), self._text.is_stopped, dtype=torch.bool, device=input_ids.device)


class AnswerManager(GenerateManager):
    """Generates answers in a thread, one at a time, for the handlers of `transformers serve`."""

    def __init__(self, stopper: GenerationStopper) -> None:
        super().__init__()
        self._stopper = stopper

    def generate_streaming(self, *given: Any, response_parser: Any = None, **_: object) -> tuple[Any, AnswerStreamer]:  # noqa: ANN401 - of transformers
        """Start an answer. The returned queue yields pieces of the answer's text, or an error, and then None."""
        queue: asyncio.Queue[object] = asyncio.Queue()
        done, streamer = self._start(*given, queue, response_parser)

        def report(done: "asyncio.Future[torch.Tensor]") -> None:
            if (error := done.exception()) is not None:
                # The handlers write the error in quotation marks without escaping (cli/serving/chat_completion.py:229).
                queue.put_nowait(_StreamError(json.dumps(self._stopper.reason or str(error))[1:-1]))

        done.add_done_callback(report)
        return queue, streamer

    async def generate_non_streaming(self, *given: Any, **_: object) -> tuple[str, int, torch.Tensor]:  # noqa: ANN401 - of transformers
        """Generate an answer. Returns its text, the number of prompt tokens, and the token ids of the answer. The text
        may continue after a stop text.
        """
        done, _streamer = self._start(*given, asyncio.Queue(), None)
        length = given[2]["input_ids"].shape[-1]
        ids = (await done)[0, length:]
        return given[1].decode(ids, skip_special_tokens=True), length, ids

    def _start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        inputs: dict[str, Any],
        settings: GenerationConfig,
        *sink: object,
    ) -> tuple["asyncio.Future[torch.Tensor]", AnswerStreamer]:
        text = AnswerText(settings.stop_strings or (), skip_special_tokens=sink[1] is None)
        settings.stop_strings = None
        streamer = AnswerStreamer(text, settings, tokenizer._tokenizer, asyncio.get_running_loop(), *sink)
        how = {"generation_config": settings, "streamer": streamer, "stopping_criteria": [_StopCriterion(text)]}
        return self.async_submit(model.generate, **inputs, **how), streamer


class AnswerState(GenerationState):
    """Gives the same `AnswerManager` to all handlers of `transformers serve`."""

    def __init__(self, stopper: GenerationStopper) -> None:
        super().__init__()
        self.manager = AnswerManager(stopper)

    def get_manager(self, *_: object, **__: object) -> AnswerManager:
        """Return the `AnswerManager` that all handlers share."""
        return self.manager
