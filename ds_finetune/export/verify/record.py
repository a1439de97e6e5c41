"""The verification record of an export: logits of fixed prompts, and a digest of every tensor written."""

import base64
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.prompt_format import PromptFormat
from ds_finetune.data.tokenizer_files import PROBES
from ds_finetune.errors import ExportError
from ds_finetune.export.output_folder import RECORD

UNVERIFIED = "UNVERIFIED"
"""File that marks an exported folder as not verified. It contains the reason."""
PROMPT_TOKENS = 32
_SAMPLED_LOGITS = 512
"""Maximum number of logits recorded per position. So 512 positions cover all rows of a head of 260,000 rows."""
_FORMAT = 1
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "人工智能是计算机科学的一个分支 它企图了解智能的实质。",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"]}',
    "Solve for x: 3x + 7 = 22. Subtract 7 from both sides to get 3x = 15, so",
    "It was the best of times, it was the worst of times, it was the age of wisdom",
    "Человек должен верить, что непонятное можно понять; иначе он не стал бы",
)
"""Texts from which prompts for a language model are made."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Digest:
    """Digest of a tensor's bytes, computed from digests of the segments in which the tensor was written."""

    runs: tuple[tuple[int, int], ...]
    """Lengths of a tensor's segments, run-length encoded: (elements, number of consecutive segments of that length)."""
    value: str
    """xxh3 digest of the concatenated digests of the tensor's segments."""

    @classmethod
    def of(cls, segments: Iterable[tuple[int, int]]) -> "Digest":
        """Compute a tensor's digest from its segments, in order: (number of elements, xxh3 digest of their bytes)."""
        runs: list[tuple[int, int]] = []
        total = xxhash.xxh3_64()
        for numel, value in segments:
            runs[-1:] = [(numel, runs[-1][1] + 1)] if runs and runs[-1][0] == numel else [*runs[-1:], (numel, 1)]
            total.update(value.to_bytes(8, "little"))
        return cls(tuple(runs), total.hexdigest())

    def lengths(self) -> list[int]:
        """Number of elements of each segment of the tensor."""
        return [numel for numel, times in self.runs for _ in range(times)]


@dataclass(frozen=True)
class ExportRecord:
    """The verification record of an export: digests of its tensors, and sampled logits of fixed prompts.

    Position n, counted over all prompts, has the logits n % stride, n % stride + stride, ..., so that all positions
    together sample every row of the language-model head.
    """

    base: str
    """Folder of the base model from which training started."""
    dtype: str
    """Dtype in which the recorded logits were computed."""
    vocab_size: int
    prompts: tuple[tuple[int, ...], ...]
    step: int | None = None
    """Number of optimizer steps for which the exported model was trained; None if unknown."""
    logits: Floats | None = None
    """Sampled logits of all positions of the prompts, in order, flat; None if no run recorded them."""
    digests: Mapping[str, Digest] | None = None
    """Digests of the exported tensors, by their names in the files."""
    num_labels: int | None = None
    """Number of classes of a classifier, whose logits are all recorded, one row per prompt; None for other models."""
    texts: tuple[str, ...] = ()
    """Texts that the exported tokenizer must tokenise to `text_ids`, or for a classifier to its last prompts."""
    text_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of `texts` as plain texts, with the special tokens that training put before and after them."""
    chat_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of `texts` as a user's message in the chat template, up to the answer."""

    def with_tokens(self, prompts: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> "ExportRecord":
        """Return a copy of a language model's record with sample texts and their ids in the format `prompts`."""
        texts = tuple(PROBES.values())
        chats = tuple(tuple(prompts.chat_ids(tokenizer, text)) for text in texts)
        return replace(
            self,
            texts=texts,
            text_ids=tuple(tuple(prompts.text_ids(tokenizer, text)) for text in texts),
            chat_ids=chats if all(chats) else (),
        )

    @property
    def stride(self) -> int:
        """Every `stride`-th logit of a position is recorded; 1 for a classifier, whose logits are all recorded."""
        return 1 if self.num_labels else sampling_stride(self.vocab_size)

    def lengths(self) -> list[int]:
        """Number of logits recorded for each token of the prompts, or for each prompt of a classifier."""
        if self.num_labels:
            return [self.num_labels] * len(self.prompts)
        positions = range(sum(map(len, self.prompts)))
        return [len(range(number % self.stride, self.vocab_size, self.stride)) for number in positions]

    def write(self, folder: Path) -> None:
        """Write the verification record to `folder`, and mark the folder as not yet verified."""
        tree = asdict(replace(self, logits=None, digests=None))
        logits = None if self.logits is None else base64.b64encode(self.logits.astype("<f4").tobytes()).decode()
        digests = {key: [digest.runs, digest.value] for key, digest in (self.digests or {}).items()}
        text = json.dumps({"format": _FORMAT, **tree, "stride": self.stride, "logits": logits, "digests": digests})
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")
        (folder / UNVERIFIED).write_text(
            f"not checked yet; see {RECORD} and `ds-finetune export --check`\n", encoding="utf-8"
        )

    @classmethod
    def read(cls, folder: Path) -> "ExportRecord":
        """Read the verification record of `folder`. ExportError if it is missing, damaged or of another format."""
        try:
            tree: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return cls._of(tree)
        except (FileNotFoundError, NotADirectoryError):
            raise ExportError(
                f"`{folder}` has no file {RECORD}",
                hint="name a folder that was exported by this version with export.verify",
            ) from None
        except (KeyError, TypeError, ValueError) as broken:
            raise ExportError(f"{folder}/{RECORD} cannot be read: {broken}", hint="export the folder again") from broken

    @classmethod
    def _of(cls, tree: dict[str, Any]) -> "ExportRecord":
        if tree["format"] != _FORMAT:
            raise ValueError(f"its format is {tree['format']}, not {_FORMAT}")
        return cls(
            base=tree["base"],
            dtype=tree["dtype"],
            vocab_size=tree["vocab_size"],
            prompts=tuple(tuple(prompt) for prompt in tree["prompts"]),
            step=tree["step"],
            logits=None if tree["logits"] is None else np.frombuffer(base64.b64decode(tree["logits"]), dtype="<f4"),
            digests={
                key: Digest(tuple((numel, times) for numel, times in runs), value)
                for key, (runs, value) in tree["digests"].items()
            },
            num_labels=tree.get("num_labels"),
            texts=tuple(tree.get("texts", ())),
            **{name: tuple(map(tuple, tree.get(name, ()))) for name in ("text_ids", "chat_ids")},
        )


def sampling_stride(vocab_size: int) -> int:
    """Step n for a language model: of the logits at a position, every n-th is recorded."""
    return -(-vocab_size // _SAMPLED_LOGITS)


def fixed_prompts(vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> tuple[tuple[int, ...], ...]:
    """Make eight prompts of `PROMPT_TOKENS` random token ids, and prompts of the first tokens of eight short texts.
    Each call returns the same prompts. Texts for which the tokenizer gives no tokens, e.g. in an unknown script, are
    left out.
    """
    texts = [] if tokenizer is None else tokenizer(list(TEXTS))["input_ids"]
    return (*_random_prompts(vocab_size), *(tuple(ids[:PROMPT_TOKENS]) for ids in texts if ids))


def _random_prompts(vocab_size: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(8)]


def classifier_prompts(vocab_size: int, *, pad: int | None, ending: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Make eight prompts of random token ids for a classifier, without the padding token `pad` and of different
    lengths. Each is followed by the tokens `ending`, which end texts in training.
    """
    shortened = (prompt[: PROMPT_TOKENS - 3 * number] for number, prompt in enumerate(_random_prompts(vocab_size)))
    return tuple((*(token for token in prompt if token != pad), *ending) for prompt in shortened)


def sampled_logits(logits: Iterable[torch.Tensor], prompts: Sequence[Sequence[int]], vocab_size: int) -> Floats:
    """Select the logits to record. `logits` has one [tokens, vocabulary] tensor per prompt; the result is flat."""
    stride = sampling_stride(vocab_size)
    starts = accumulate((len(prompt) for prompt in prompts), initial=0)
    parts: list[Floats] = []
    for start, rows in zip(starts, logits, strict=False):
        assert rows.shape[1] == vocab_size, (rows.shape, vocab_size)
        parts += [row[(start + index) % stride :: stride].float().cpu().numpy() for index, row in enumerate(rows)]
    assert len(parts) == sum(map(len, prompts)), (len(parts), prompts)
    return np.concatenate(parts)
