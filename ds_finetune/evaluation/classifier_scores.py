"""Evaluates an exported classifier on labelled texts, or a reward model on pairs of answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from ds_finetune.config.objectives import RewardObjective
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.errors import ConfigError
from ds_finetune.evaluation.model_scores import length_batches
from ds_finetune.evaluation.objective_scores import ObjectiveScores
from ds_finetune.export.load import load_scorer
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.loss.score_config import REWARD, SETTINGS, is_classifier
from ds_finetune.objectives.objective import ScoreObjective
from ds_finetune.objectives.scores import Classification, Regression, Reward


@dataclass(frozen=True)
class LabelledDocument:
    """A labelled text, or one side of a pair: token ids, position where a second text begins, and target."""

    ids: list[int]
    second: int
    target: float


def objective_of(config: PretrainedConfig) -> ScoreObjective:
    """Choose the objective whose metrics apply to a classifier with the config.json `config`.

    A model with one label is a regression, unless its config.json says that it was trained as a reward model.
    """
    if getattr(config, SETTINGS, {}).get("objective") == REWARD:
        return Reward()
    return Regression() if config.num_labels == 1 else Classification(config.num_labels)


def kind_of(config: PretrainedConfig) -> RowKind:
    """Kind of rows on which a classifier with the config.json `config` is scored, with its class names."""
    objective = objective_of(config)
    if objective.name == REWARD:
        return RowKind.of(RewardObjective(name="reward"))
    names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    labels = names if config.num_labels > 1 else ()
    return RowKind("labelled", objective.name, labels=labels, num_labels=config.num_labels, has_known_classes=True)


def labelled_documents(rows: PreparedRows, limit: int | None) -> list[LabelledDocument]:
    """Documents of the first `limit` labelled texts or pairs (None: of all)."""
    documents, size = rows.documents, max(rows.kind.documents_per_unit, 1)
    number = min(rows.num_units, limit or rows.num_units) * size
    return [
        LabelledDocument(rows.document(index)[0], int(documents.second[index]), float(documents.targets[index]))
        for index in range(number)
    ]


def score_labelled(folder: Path, documents: Sequence[LabelledDocument], *, batch_tokens: int) -> ObjectiveScores:
    """Score documents by the classifier in `folder`, in padded batches of at most `batch_tokens` tokens."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    score, pad = load_scorer(folder), config.pad_token_id
    scores = np.zeros((len(documents), config.num_labels))
    lengths = [len(document.ids) for document in documents]
    # Without a padding token, transformers refuses batches of several documents for a classifier.
    batches = length_batches(lengths, batch_tokens if pad is not None else 1)
    for numbers in batches:
        ids = [torch.tensor(documents[number].ids) for number in numbers]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=0 if pad is None else pad),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }
        if getattr(config, "type_vocab_size", 1) != 1:
            types = [torch.arange(len(row)).ge(documents[n].second).long() for n, row in zip(numbers, ids, strict=True)]
            inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
        scores[numbers] = score(inputs).numpy()
    targets = np.array([document.target for document in documents])
    return ObjectiveScores.of_classifier(objective_of(config), scores, targets)


def check_baseline(folder: Path, base: Path) -> None:
    """Raise ConfigError where `base` is not a classifier with the same labels as the classifier in `folder`."""
    trees = [json.loads((each / "config.json").read_text(encoding="utf-8")) for each in (folder, base)]
    names = [tree.get("id2label") if is_classifier(tree) else None for tree in trees]
    if names[0] != names[1]:
        raise ConfigError(
            f"--baseline {base} has the labels {names[1]}, and `{folder}` has {names[0]}",
            hint="compare classifiers of the same classes",
        )
