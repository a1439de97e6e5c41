"""Answers prompts, classifies texts and chats with an exported model, by transformers or ONNX Runtime."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_finetune.data.chat_template import TemplateLimits
from ds_finetune.errors import ExportError

Message = dict[str, str]
EXIT_WORD = "exit"


def ask(folder: Path, prompts: Sequence[str], *, max_new_tokens: int = 128) -> list[str]:
    """Answer prompts greedily with the model in `folder`. Its chat template, if there is one, renders the prompts."""
    import torch

    for prompt in prompts:
        _check_text(prompt)
    model, tokenizer = _load(folder, do_sample=False)
    context, answers = _context(model), []
    for prompt in prompts:
        message = {"role": "user", "content": prompt}
        inputs = _inputs(tokenizer, [message]) if tokenizer.chat_template else tokenizer(prompt, return_tensors="pt")
        ids = inputs["input_ids"].to(model.device)
        limit = min(max_new_tokens, _room(ids.shape[1], context))
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": limit}
        with torch.no_grad():
            out = model.generate(ids, **settings)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return answers


def _load(folder: Path, **settings: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of transformers
    """Load the model in `folder` and its tokenizer. `generate` stops at the tokens of `end_ids`. ExportError where
    transformers refuses the generation config with these `settings`, e.g. sampling at temperature 0.
    """
    import torch

    from ds_finetune.data.prompt_format import end_ids
    from ds_finetune.data.tokenizer_files import load_tokenizer
    from ds_finetune.export.load import load_exported

    model, tokenizer = load_exported(folder), load_tokenizer(str(folder))
    model.generation_config.eos_token_id = end_ids(folder, model.config, tokenizer)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **settings)
    except (ValueError, TypeError, LookupError, ArithmeticError) as refused:
        raise ExportError(
            f"transformers cannot generate with `{folder / 'generation_config.json'}`: {refused}",
            hint="correct it, or move it away",
        ) from refused
    return model, tokenizer


def _inputs(tokenizer: Any, messages: Sequence[Message]) -> Any:  # noqa: ANN401 - of transformers
    from jinja2 import TemplateError

    try:
        with TemplateLimits(str(tokenizer.chat_template)):
            text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        has_all = all(each["content"].strip() in text for each in messages if each["role"] == "user")
        problem = "" if has_all else "its text is not in the prompt"
    except TemplateError as refused:
        problem = str(refused)
    if problem:
        raise ExportError(
            f"the chat template of `{tokenizer.name_or_path}` does not render the message: {problem}",
            hint="correct its chat_template.jinja, or send another message",
        )
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")


def _context(model: Any) -> float:  # noqa: ANN401 - of transformers
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def _room(tokens: int, context: float) -> float:
    if not tokens:
        raise ExportError(f"the prompt has {tokens} tokens, and a model needs at least one", hint="write a text")
    if tokens >= context:
        raise ExportError(
            f"the message has {tokens} tokens, and the model's context is {context} tokens",
            hint="send a shorter message",
        )
    return context - tokens


def classify(folder: Path, texts: Sequence[str]) -> list[dict[str, float]]:
    """Compute for each text the probability of each class by name; a regression model gives one number, under its
    label.

    Texts are tokenised as in a pipeline of transformers. ExportError for a reward model, whose input is a dialogue.
    """
    from ds_finetune.export.load import load_scorer
    from ds_finetune.foreign.auto_configs import AutoConfig, AutoTokenizer
    from ds_finetune.model.loss.score_config import REWARD, SETTINGS

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, SETTINGS, {}).get("objective") == REWARD:
        raise ExportError(
            f"`{folder}` holds a reward model, which scores answers to prompts, not single texts",
            hint="score it on pairs of answers with `ds-finetune eval`",
        )
    tokenizer, score = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), load_scorer(folder)
    names, results = config.id2label, []
    for text in texts:
        _check_text(text)
        logits = score(dict(tokenizer(text, return_tensors="pt")))[0]
        scores = logits if len(logits) == 1 else logits.softmax(-1)
        results.append({str(names[number]): score for number, score in enumerate(scores.tolist())})
    return results


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ExportError(
            f"the text {text!r:.60} has bytes that are no characters in the encoding of this terminal",
            hint="write it in UTF-8, and unset PYTHONIOENCODING if it names another encoding",
        ) from None


class ChatSession:
    """A chat: the model, its tokenizer and the messages so far. ExportError if there is no chat template."""

    def __init__(self, folder: Path, *, max_new_tokens: int) -> None:
        self._model, self._tokenizer = _load(folder)
        if not self._tokenizer.chat_template:
            raise ExportError(
                f"the tokenizer of `{folder}` has no chat template",
                hint="ask it single questions with `ds-finetune ask`",
            )
        self._max_new_tokens = max_new_tokens
        self._context = _context(self._model)
        self.messages: list[Message] = []

    def make_room(self, text: str) -> str:
        """Drop the earliest messages until `text` and its answer fit into the model's context.

        Returns a line for the user, empty if all messages fit; ExportError if `text` alone does not fit.
        """
        context, messages = self._context, self.messages
        _check_text(text)
        while context and messages and self._num_tokens(messages, text) + self._max_new_tokens > context:
            messages = messages[2:]
        _room(self._num_tokens(messages, text), context)
        dropped, self.messages = len(self.messages) - len(messages), messages
        return f"({dropped} earlier messages left out: the context is {context} tokens)\n" if dropped else ""

    def _num_tokens(self, messages: list[Message], text: str) -> int:
        return int(_inputs(self._tokenizer, [*messages, {"role": "user", "content": text}])["input_ids"].shape[1])

    def reply(self, text: str) -> Iterator[str]:
        """Yield pieces of the model's answer to `text` and all earlier messages, sampled by its generation config.
        Question and answer are added to the messages when the answer is complete.
        """
        from transformers import TextIteratorStreamer

        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = _inputs(self._tokenizer, messages).to(self._model.device)
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        limit = min(self._max_new_tokens, _room(ids.shape[1], self._context))
        settings = {"attention_mask": mask, "streamer": streamer, "max_new_tokens": limit}
        failures: list[Exception] = []

        def generate() -> None:
            try:
                self._model.generate(ids, **settings)
            except Exception as failed:  # noqa: BLE001 - raised again in the thread that waits for the pieces
                failures.append(failed)
                streamer.on_finalized_text("", stream_end=True)

        # Ctrl-C ends the program at once, because Python does not wait for daemon threads.
        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            yield piece
        thread.join()
        if failures:
            raise failures[0]
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def run_chat(session: ChatSession, *, read: Callable[[], str], write: Callable[[str], None]) -> None:
    """Answer each line from `read` until it returns `exit` or raises EOFError; `write` gets the text of the answers."""
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
