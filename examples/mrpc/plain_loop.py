"""Trains examples/mrpc/run.yaml's model in one process with only transformers and torch, to compare with.

python examples/mrpc/plain_loop.py MODEL DATA SEED [EPOCHS]

MODEL is the folder of the encoder, DATA that of train.jsonl and test.jsonl. Weights are fp32, products bf16 (autocast).
Each epoch prints one JSON object: mean training loss, and loss, accuracy, F1 and Matthews' correlation on the test
rows.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

BATCH, LR, WEIGHT_DECAY, WARMUP, MAX_TOKENS, MAX_GRAD_NORM = 48, 5e-5, 0.01, 0.1, 128, 1.0


def main(model_folder: str, data: Path, seed: int, epochs: int) -> None:
    """Train, and print the scores of each epoch."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=2)
    train, test = (_read(data / f"{split}.jsonl", tokenizer) for split in ("train", "test"))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    steps = -(-len(train) * epochs // BATCH)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP * steps), steps)
    for epoch in range(epochs):
        began, order, losses = time.monotonic(), torch.randperm(len(train)).tolist(), []
        model.train()
        for first in range(0, len(order), BATCH):
            rows = [train[number] for number in order[first : first + BATCH]]
            loss = _losses(model, tokenizer, rows)[0].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seconds = time.monotonic() - began
        found = {"seed": seed, "epoch": epoch + 1, "seconds": round(seconds, 1), "loss": sum(losses) / len(losses)}
        print(json.dumps(found | _scores(model, tokenizer, test)), flush=True)


def _read(file: Path, tokenizer: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    parts = tokenizer([r["text"] for r in rows], [r["text_pair"] for r in rows], truncation=True, max_length=MAX_TOKENS)
    keys = ("input_ids", "token_type_ids", "attention_mask")
    return [{"label": row["label"]} | {key: parts[key][number] for key in keys} for number, row in enumerate(rows)]


def _losses(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Loss and class of each row."""
    labels = torch.tensor([row["label"] for row in rows])
    padded = tokenizer.pad([{key: row[key] for key in row if key != "label"} for row in rows], return_tensors="pt")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(**padded).logits.float()
    return functional.cross_entropy(scores, labels, reduction="none"), scores.argmax(dim=1)


@torch.no_grad()
def _scores(model: Any, tokenizer: Any, test: list[dict[str, Any]]) -> dict[str, float]:  # noqa: ANN401
    model.eval()
    parts = [_losses(model, tokenizer, test[first : first + BATCH]) for first in range(0, len(test), BATCH)]
    losses, found = (torch.cat(each) for each in zip(*parts, strict=True))
    true = torch.tensor([row["label"] for row in test])
    counts = [int(((found == f) & (true == t)).sum()) for f, t in ((1, 1), (1, 0), (0, 1), (0, 0))]
    tp, fp, fn, tn = counts
    spread = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return {
        "eval/loss": float(losses.mean()),
        "eval/accuracy": (tp + tn) / len(test),
        "eval/f1": 2 * tp / (2 * tp + fp + fn),
        "eval/matthews": (tp * tn - fp * fn) / spread**0.5 if spread else 0.0,
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 3)
