"""Tiny encoders of each family, and packed rows of documents for them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from ds_finetune.objectives.objective import Examples

_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "num_labels": 3,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "max_position_embeddings": 40, **_NO_DROPOUT, **_TINY},
    "roberta": {"model_type": "roberta", "max_position_embeddings": 42, "type_vocab_size": 1, **_NO_DROPOUT, **_TINY},
    "modernbert": {"model_type": "modernbert", "local_attention": 6, "pad_token_id": 0, **_TINY},
    "modernbert_mean": {
        "model_type": "modernbert",
        "local_attention": 6,
        "pad_token_id": 0,
        "classifier_pooling": "mean",
        **_TINY,
    },
}
"""Contents of config.json by name; without dropout. A window of ModernBERT is shorter than the documents."""
LENGTHS = ((5, 19, 2), (26,), (1, 1, 20, 4))
"""Documents of three rows; the last one of each row is padding."""


def encoder_config(name: str, **extra: Any) -> PretrainedConfig:
    """The configuration of a tiny encoder."""
    return AutoConfig.for_model(**{**ENCODERS[name], **extra})


def save_encoder(name: str, folder: Path, **extra: Any) -> PreTrainedModel:
    """Save a tiny encoder for classification in fp32 as transformers does, and return it."""
    torch.manual_seed(11)
    model = AutoModelForSequenceClassification.from_config(encoder_config(name, **extra)).float()
    model.save_pretrained(folder)
    return model


def packed_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Examples]:
    """Token ids, positions and token types, int64 [rows, tokens] each, and the documents of the rows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (len(LENGTHS), 26), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    types = (positions > 2).long()
    starts, ends, index = [], [], torch.full_like(ids, -1)
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths[:-1]:
            index[row, begin : begin + length] = len(starts)
            starts.append(row * 26 + begin)
            ends.append(row * 26 + begin + length - 1)
            begin += length
    count = len(starts)
    examples = Examples(
        index=index,
        starts=torch.tensor(starts),
        ends=torch.tensor(ends),
        numbers=torch.arange(count),
        targets=torch.arange(count, dtype=torch.float64) % 3,
        reference=torch.zeros(count, dtype=torch.float64),
    )
    return ids, positions, types, examples
