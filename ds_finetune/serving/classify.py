"""Scores of texts by an exported classifier, tokenised as a pipeline of transformers tokenises them."""

from collections.abc import Sequence
from pathlib import Path

from ds_finetune.errors import ExportError


def classify(folder: Path, texts: Sequence[str]) -> list[dict[str, float]]:
    """For each text the probability of each class by its name, or under the name of the only label the number that a
    regression predicts.

    ExportError for a reward model, whose input is a dialogue.
    """
    from ds_finetune.export.load import load_scorer
    from ds_finetune.foreign.auto_configs import AutoConfig, AutoTokenizer
    from ds_finetune.model.loss.score_config import REWARD, SETTINGS

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, SETTINGS, {}).get("objective") == REWARD:
        raise ExportError(
            f"`{folder}` holds a reward model, which scores answers to prompts and no single texts",
            hint="score it on pairs of answers with `ds-finetune eval`",
        )
    tokenizer, score = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), load_scorer(folder)
    names, results = config.id2label, []
    for text in texts:
        logits = score(dict(tokenizer(text, return_tensors="pt")))[0]
        scores = logits if len(logits) == 1 else logits.softmax(-1)
        results.append({str(names[number]): score for number, score in enumerate(scores.tolist())})
    return results
