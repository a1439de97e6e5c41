"""Tiny classifiers that plain transformers builds, and their tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from tests.model.tiny import CONFIGS

CLASSES = {0: "billing", 1: "bug", 2: "praise"}
EOS, PAD, BOS = 1, 2, 0
WORDS = [*"abcdefghijklmnopqrstuvwxyz", "charge", "twice", "crash", "love", "it", "on", "start", "thanks", "the", "app"]
TEXTS = ("charge twice", "the app crash on start", "love it thanks", "it")
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    },
}
ENCODERS["roberta"] = {**ENCODERS["bert"], "type_vocab_size": 1, "pad_token_id": PAD}
ENCODERS["modernbert"] = {
    **ENCODERS["bert"],
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "pad_token_id": PAD,
    "initializer_cutoff_factor": 2.0,
}


def classifier(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny classifier of three classes in fp32 whose logits differ from text to text."""
    torch.manual_seed(3)
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "num_labels": 3, "id2label": CLASSES}
    tree = {**(CONFIGS[family] if family in CONFIGS else ENCODERS[family]), **tokens, **changes}
    tree["label2id"] = {name: number for number, name in tree["id2label"].items()}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **tree)).float().eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() == 1):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model


def write_tokenizer(folder: Path, *, adds_eos: bool = False) -> Path:
    """A tokenizer of words; most decoders' add no EOS."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {"<s>": BOS, "</s>": EOS, "<pad>": PAD, "<unk>": 3}
    vocab |= {word: number for number, word in enumerate(WORDS, start=len(vocab))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>"])
    if adds_eos:
        core.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", EOS)]
        )
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
