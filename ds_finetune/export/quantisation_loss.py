"""Measures how quantisation changes the loss and the predictions of a language model."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ds_finetune.config.units import bytes_text
from ds_finetune.data.tokenizer_files import load_tokenizer

_ROWS, _LENGTH = 8, 128
"""Models are compared on this many rows of a run's data, cut to this number of tokens."""
_TEXTS, _TEXT_LENGTH, _AT_ONCE = 32, 8, 8
"""Number of sampled texts, tokens per text, and texts per forward pass; logits are [texts, tokens, vocabulary]."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids [rows, length], and a mask of the tokens whose loss is measured."""


@dataclass(frozen=True)
class QuantisationLoss:
    """Loss of a model before and after quantisation, and the divergence between both versions."""

    dtype: str
    rows: str
    """Where the compared tokens came from, as words in a message."""
    tokens: int
    loss_before: float
    """Mean negative log-likelihood per token before quantisation, in nats."""
    loss_after: float
    divergence: float
    """Mean Kullback-Leibler divergence of next-token distributions after quantisation from those before, in nats."""
    bytes_before: int
    bytes_after: int

    def line(self) -> str:
        """A line for the terminal with losses before and after quantisation, the divergence and the sizes."""
        return (
            f"{self.dtype}: loss {self.loss_before:.4f} before and {self.loss_after:.4f} after, KL divergence "
            f"{self.divergence:.1e} nats a token, on {self.tokens} tokens {self.rows}; "
            f"{bytes_text(self.bytes_before)} became {bytes_text(self.bytes_after)}"
        )


def quantisation_loss(
    dtype: str, source: Path, before: PreTrainedModel, after: PreTrainedModel, sizes: tuple[int, int]
) -> QuantisationLoss:
    """Compare a model before and after quantisation on the first rows of the run that wrote `source`. Without such
    a run, use texts sampled from `before`. `sizes` are the bytes of both models.
    """
    rows, sums = _rows_of_run(source, before.name_or_path), np.zeros(4)
    rows_text = f"of {len(rows)} rows of the run" if rows else "that the model sampled"
    for ids, counts in rows or _sampled(before):
        chosen = ids[:, 1:][counts[:, 1:], None].numpy()
        with torch.no_grad():
            logits = (model(ids, use_cache=False).logits[:, :-1][counts[:, 1:]] for model in (before, after))
            first, last = (each.float().log_softmax(-1).numpy() for each in logits)
        losses = (-np.take_along_axis(each, chosen, -1).sum(dtype=np.float64) for each in (first, last))
        sums += (len(chosen), *losses, (np.exp(first) * (first - last)).sum(dtype=np.float64))
    loss_before, loss_after, divergence = (sums[1:] / sums[0]).tolist()
    return QuantisationLoss(dtype, rows_text, int(sums[0]), loss_before, loss_after, divergence, *sizes)


def _rows_of_run(source: Path, tokenizer_folder: str) -> list[Batch]:
    """First tokens of documents that a run stored in data.json; empty if there is no run, or the run streams data."""
    folders = (source, *source.absolute().parents[:2])
    file = next((file for folder in folders if (file := folder / "data.json").is_file()), None)
    samples = [] if file is None else json.loads(file.read_text(encoding="utf-8")).get("samples", [])
    rows: list[Batch] = []
    for sample in samples[:_ROWS]:
        ids: list[int] = []
        counts: list[bool] = []
        for text, is_supervised in sample["spans"]:
            ids += load_tokenizer(tokenizer_folder)(text, add_special_tokens=False)["input_ids"]
            counts += [bool(is_supervised)] * (len(ids) - len(counts))
        counts = counts[:_LENGTH]
        if len(counts) > 1:
            counts = counts if any(counts[1:]) else [True] * len(counts)
            rows.append((torch.tensor([ids[: len(counts)]]), torch.tensor([counts])))
    return rows


def _sampled(model: PreTrainedModel) -> list[Batch]:
    """Let the model sample texts at temperature 1, each after one random token. Each call returns the same texts."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        first = torch.randint(model.config.vocab_size, (_TEXTS, 1))
        # The model's own generation settings may restrict sampling or end a text early.
        model.generation_config = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=_TEXT_LENGTH - 1,
            min_new_tokens=_TEXT_LENGTH - 1,
            pad_token_id=0,
            use_cache=model.generation_config.use_cache,
        )
        ids = model.generate(first, attention_mask=torch.ones_like(first))
    return [(part, torch.ones_like(part, dtype=torch.bool)) for part in ids.split(_AT_ONCE)]
