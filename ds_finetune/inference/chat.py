"""A conversation with an exported folder in the terminal: plain transformers or ONNX Runtime, its chat template, the
answer as it comes.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ds_finetune.errors import ExportError

Message = dict[str, str]
END = "exit"
"""What a person types to end."""


class ChatSession:
    """A model, its tokenizer and what was said."""

    def __init__(self, folder: Path, *, max_new_tokens: int) -> None:
        from transformers import AutoTokenizer

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
        """What the model says to `text` after all that was said before, piece by piece, decoded as the model's
        generation config draws it.

        Question and answer join the history when the answer is whole.
        """
        from transformers import TextIteratorStreamer

        asked = [*self.messages, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        inputs = self._tokenizer(rendered, add_special_tokens=False, return_tensors="pt").to(self._model.device)
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        settings = {"attention_mask": mask, "streamer": streamer, "max_new_tokens": self._max_new_tokens}
        # A daemon: Ctrl-C in the middle of an answer ends the program, not the answer first.
        answering = threading.Thread(target=self._model.generate, args=(ids,), kwargs=settings, daemon=True)
        answering.start()
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            yield piece
        answering.join()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def run_chat(conversation: ChatSession, *, ask: Callable[[], str], say: Callable[[str], None]) -> None:
    """Take turns until `ask` gives `exit` or has no more lines; `say` writes a piece of text as it is."""
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return
        if text == END:
            return
        if text:
            for piece in conversation.reply(text):
                say(piece)
            say("\n")
