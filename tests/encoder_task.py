"""A tiny classification task for an encoder in a folder: model, tokenizer, pairs of texts with labels, and run file."""

import json
import random
from pathlib import Path
from typing import Any

import yaml
from tokenizers import BertWordPieceTokenizer
from transformers import PreTrainedTokenizerFast

from tests.model.encoders import save_encoder

WORDS = [f"word{number}" for number in range(80)]
_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def encoder_task(folder: Path, *, dropout: float = 0.0, name: str = "bert", **sections: Any) -> Path:
    """Write the task and return its run file: 32 pairs of texts in three classes, on two ranks or one."""
    ratios = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout} if name == "bert" else {}
    model = save_encoder(name, folder / "model", **ratios)
    _save_tokenizer(folder / "model", pad=model.config.pad_token_id)
    draw = random.Random(4)
    for split in ("train", "eval"):
        lines = [json.dumps(_row(draw)) for _ in range(32)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    train = {
        "for": "3 steps",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_seq_len": 40,
        "precision": "fp32",
        "activation_checkpointing": "none",
    }
    tree: dict[str, Any] = {
        "model": str(folder / "model"),
        "objective": "classification",
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "packing": False,
            "cache_dir": str(folder / "cache"),
        },
        "train": train,
        "optim": {"lr": 1e-3},
        "eval": {"keep_best": False},
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "log": {"trackers": [], "seconds": 0},
        "export": {"verify": False},
        "output_dir": str(folder / "run"),
    }
    for key, values in sections.items():
        tree[key] = tree.get(key, {}) | values if isinstance(values, dict) else values
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(tree))
    return run_file


def _row(draw: random.Random) -> dict[str, Any]:
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(2)]
    return {"sentence1": texts[0], "sentence2": texts[1], "label": draw.randrange(3)}


def _save_tokenizer(folder: Path, *, pad: int) -> None:
    """A WordPiece tokenizer in BERT's form whose padding token has the number `pad`."""
    special = [text for text in _SPECIAL.values() if text != "[PAD]"]
    special.insert(pad, "[PAD]")
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = BertWordPieceTokenizer(vocabulary)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **_SPECIAL).save_pretrained(folder)
