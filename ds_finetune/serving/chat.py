"""A chat with an exported folder in the terminal, by plain transformers or ONNX Runtime; answers are streamed."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds_finetune.data.chat_template import TemplateLimits
from ds_finetune.errors import ExportError

Message = dict[str, str]
EXIT_WORD = "exit"
"""What the user types to end the chat."""


class ChatSession:
    """A model, its tokenizer and the messages so far; ExportError where the tokenizer has no chat template."""

    def __init__(self, folder: Path, *, max_new_tokens: int) -> None:
        from ds_finetune.export.load import load_exported
        from ds_finetune.foreign.auto_configs import AutoTokenizer

        self._model = load_exported(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not self._tokenizer.chat_template:
            raise ExportError(
                f"the tokenizer of `{folder}` has no chat template",
                hint="ask it single questions with `ds-finetune ask`",
            )
        self._max_new_tokens = max_new_tokens
        self._context: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self.messages: list[Message] = []

    def make_room(self, text: str) -> str:
        """Forget the earliest messages until `text` and its answer fit into the model's context.

        Returns what to tell the user, which is empty where all messages fit; ExportError where `text` does not fit
        without earlier messages.
        """
        context, kept = self._context, self.messages
        while context and kept and self._num_tokens(kept, text) + self._max_new_tokens > context:
            # A question and its answer.
            kept = kept[2:]
        if context and (tokens := self._num_tokens(kept, text)) >= context:
            raise ExportError(
                f"the message has {tokens} tokens, and the model's context is {context} tokens",
                hint="send a shorter one",
            )
        dropped, self.messages = len(self.messages) - len(kept), kept
        return f"({dropped} earlier messages left out: the context is {context} tokens)\n" if dropped else ""

    def _num_tokens(self, messages: list[Message], text: str) -> int:
        return int(self._inputs(messages, text)["input_ids"].shape[1])

    def _inputs(self, messages: list[Message], text: str) -> Any:  # noqa: ANN401 - of transformers
        asked = [*messages, {"role": "user", "content": text}]
        with TemplateLimits(str(self._tokenizer.chat_template)):
            rendered = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        return self._tokenizer(rendered, add_special_tokens=False, return_tensors="pt")

    def reply(self, text: str) -> Iterator[str]:
        """The model's answer to `text` after all earlier messages, in pieces, sampled by its generation config.

        Question and answer are added to the messages when the answer is complete.
        """
        from transformers import TextIteratorStreamer

        inputs = self._inputs(self.messages, text).to(self._model.device)
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        limit = min(self._max_new_tokens, (self._context or math.inf) - ids.shape[1])
        settings = {"attention_mask": mask, "streamer": streamer, "max_new_tokens": limit}
        # A daemon thread, so that Ctrl-C during an answer ends the program at once.
        thread = threading.Thread(target=self._model.generate, args=(ids,), kwargs=settings, daemon=True)
        thread.start()
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            yield piece
        thread.join()
        answer = {"role": "assistant", "content": "".join(pieces)}
        self.messages = [*self.messages, {"role": "user", "content": text}, answer]


def run_chat(session: ChatSession, *, read: Callable[[], str], write: Callable[[str], None]) -> None:
    """Answer lines until `read` returns `exit` or raises EOFError; `write` prints a piece of text unchanged."""
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        if text == EXIT_WORD:
            return
        if text:
            try:
                write(session.make_room(text))
            except ExportError as too_long:
                write(f"{too_long}\n")
                continue
            for piece in session.reply(text):
                write(piece)
            write("\n")
