"""Generation of one answer: its tokens become text, which ends before the first stop text."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria
from transformers.cli.serving.utils import (
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
    response_events_to_chunks,
)

from ds_finetune.foreign.guard import Foreign
from ds_finetune.serving.request_queue import GenerationStopper

_DECODING = Foreign("transformers", "cli/serving/utils.py:476, DirectStreamer")
_INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes to that are not yet, or never will be, a character."""


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where `text` is cut: at the beginning of the stop text that is complete first, of several the longest."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


class AnswerText:
    """Decodes the tokens of an answer one by one, and leaves out the first stop text and what follows it.

    It takes the place of the `DecodeStream` of tokenizers 0.23, which raises an error where a byte makes the bytes
    before it invalid.
    """

    def __init__(self, stops: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._stops, self._skip = stops, skip_special_tokens
        self._ids: list[int] = []
        self._begin = self._end = 0
        self._held = ""
        self.is_stopped = False

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """Add a token; returns the new text that later tokens cannot change, None where there is none."""
        self._ids.append(token)
        text = self._undecoded(tokenizer)
        if not text or text.endswith(_INCOMPLETE):
            return None
        self._begin, self._end = self._end, len(self._ids)
        return self._release(text) or None

    def finish(self, tokenizer: Tokenizer) -> str:
        """The text that was held back."""
        text = self._release(self._undecoded(tokenizer))
        return text if self.is_stopped else text + self._held

    def _undecoded(self, tokenizer: Tokenizer) -> str:
        """The text of the tokens from `_end` on, decoded with some before them, because a first space may be lost."""
        before = tokenizer.decode(self._ids[self._begin : self._end], skip_special_tokens=self._skip)
        return str(tokenizer.decode(self._ids[self._begin :], skip_special_tokens=self._skip)[len(before) :])

    def _release(self, text: str) -> str:
        """Add `text` to what is held back; returns what cannot be part of a stop text."""
        if self.is_stopped:
            return ""
        self._held += text
        end = stop_position(self._held, self._stops)
        self.is_stopped = end is not None
        if end is None:
            size = len(self._held)
            begun = (at for at in range(size) if any(stop.startswith(self._held[at:]) for stop in self._stops))
            end = next(begun, size)
        released, self._held = self._held[:end], self._held[end:]
        return released


class AnswerStreamer(DirectStreamer):
    """The streamer of `transformers serve`, with the text of an `AnswerText`."""

    def __init__(self, text: AnswerText, settings: GenerationConfig, tokenizer: Tokenizer, *given: Any) -> None:  # noqa: ANN401
        super().__init__(tokenizer, *given)
        _DECODING.attribute(self, "_decode_stream")
        self._decode_stream, self._settings = text, settings

    def end(self) -> None:
        """Send the text that was held back, and the end of the answer."""
        rest = self._decode_stream.finish(self._tokenizer)
        items = [rest] if self._parser is None else response_events_to_chunks(self._parser.feed(rest))
        for item in items if rest else []:
            self._enqueue(item)
        if self._decode_stream.is_stopped:
            # The handlers say "length" where the answer has this many tokens (cli/serving/chat_completion.py:257, 301).
            self._settings.max_new_tokens = None
        super().end()


class _StopCriterion(StoppingCriteria):
    """Ends a generation whose text has come to a stop text."""

    def __init__(self, text: AnswerText) -> None:
        self._text = text

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((len(input_ids),), self._text.is_stopped, dtype=torch.bool, device=input_ids.device)


class AnswerManager(GenerateManager):
    """Generates one answer after the other on a thread, for the handlers of `transformers serve`."""

    def __init__(self, stopper: GenerationStopper) -> None:
        super().__init__()
        self._stopper = stopper

    def generate_streaming(self, *given: Any, response_parser: Any = None, **_: object) -> tuple[Any, AnswerStreamer]:  # noqa: ANN401 - of transformers
        """Start an answer; its pieces, an error, and None at its end come from the queue."""
        queue: asyncio.Queue[object] = asyncio.Queue()
        done, streamer = self._start(*given, queue, response_parser)
        done.add_done_callback(lambda done: self._report(done.exception(), queue))
        return queue, streamer

    async def generate_non_streaming(self, *given: Any, **_: object) -> tuple[str, int, torch.Tensor]:  # noqa: ANN401 - of transformers
        """The text of an answer, not cut yet, the number of tokens of the prompt, and the tokens of the answer."""
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
        """Start `generate`; `sink` is the queue for pieces of text, and the parser of responses or None."""
        text = AnswerText(settings.stop_strings or (), skip_special_tokens=sink[1] is None)
        settings.stop_strings = None
        streamer = AnswerStreamer(text, settings, tokenizer._tokenizer, asyncio.get_running_loop(), *sink)
        how = {"generation_config": settings, "streamer": streamer, "stopping_criteria": [_StopCriterion(text)]}
        return self.async_submit(model.generate, **inputs, **how, tokenizer=tokenizer), streamer

    def _report(self, error: BaseException | None, queue: "asyncio.Queue[object]") -> None:
        if error is not None:
            # The handlers write the text between two quotation marks (cli/serving/chat_completion.py:229).
            queue.put_nowait(_StreamError(json.dumps(self._stopper.reason or str(error))[1:-1]))


class AnswerState(GenerationState):
    """Gives all handlers the same manager."""

    def __init__(self, stopper: GenerationStopper) -> None:
        super().__init__()
        self.manager = AnswerManager(stopper)

    def get_manager(self, *_: object, **__: object) -> AnswerManager:
        """The manager."""
        return self.manager
