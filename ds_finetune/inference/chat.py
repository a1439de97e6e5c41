"""A chat with an exported folder in the terminal, by plain transformers or ONNX Runtime; answers are streamed."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ds_finetune.data.template_limits import TemplateLimits
from ds_finetune.errors import ExportError

Message = dict[str, str]
EXIT_WORD = "exit"
"""What the user types to end the chat."""


class ChatSession:
    """A model, its tokenizer and the messages so far; ExportError where the tokenizer has no chat template."""

    def __init__(self, folder: Path, *, max_new_tokens: int) -> None:
        from ds_finetune.auto_configs import AutoTokenizer
        from ds_finetune.export.load import load_exported

        self._model = load_exported(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not self._tokenizer.chat_template:
            raise ExportError(
                f"the tokenizer of `{folder}` has no chat template",
                hint="ask it single questions with `ds-finetune ask`",
            )
        self._max_new_tokens = max_new_tokens
        self.messages: list[Message] = []

    def reply(self, text: str) -> Iterator[str]:
        """The model's answer to `text` after all earlier messages, in pieces, sampled by its generation config.

        Question and answer are added to the messages when the answer is complete.
        """
        from transformers import TextIteratorStreamer

        messages = [*self.messages, {"role": "user", "content": text}]
        with TemplateLimits(str(self._tokenizer.chat_template)):
            rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self._tokenizer(rendered, add_special_tokens=False, return_tensors="pt").to(self._model.device)
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        settings = {"attention_mask": mask, "streamer": streamer, "max_new_tokens": self._max_new_tokens}
        # A daemon thread, so that Ctrl-C during an answer ends the program at once.
        thread = threading.Thread(target=self._model.generate, args=(ids,), kwargs=settings, daemon=True)
        thread.start()
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            yield piece
        thread.join()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


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
            for piece in session.reply(text):
                write(piece)
            write("\n")
