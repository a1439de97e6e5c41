"""Scores of texts by an exported classifier, tokenised as a pipeline of transformers tokenises them."""

from collections.abc import Sequence
from pathlib import Path

from ds_finetune.errors import ExportError


def classify(folder: Path, texts: Sequence[str]) -> list[dict[str, float]]:
    """For each text the probability of each class by its name, or under the name of the only label the number that a
    regression predicts.

    ExportError for a reward model, whose input is a dialogue.
    """
    import torch
    from transformers import AutoTokenizer

    from ds_finetune.export.classifiers import SETTINGS
    from ds_finetune.export.load import load_classifier

    model = load_classifier(folder)
    if getattr(model.config, SETTINGS, {}).get("objective") == "reward":
        raise ExportError(
            f"`{folder}` holds a reward model, which scores answers to prompts and no single texts",
            hint="score it on pairs of answers with `ds-finetune eval`",
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    names, results = model.config.id2label, []
    for text in texts:
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt").to(model.device)).logits[0].float()
        scores = logits if len(logits) == 1 else logits.softmax(-1)
        results.append({str(names[number]): score for number, score in enumerate(scores.tolist())})
    return results
