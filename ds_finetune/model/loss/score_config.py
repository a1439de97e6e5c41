"""Settings of a classifier in the model's configuration: names of the classes, and the padding token."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.config.objectives import ClassificationObjective, ObjectiveConfig
from ds_finetune.errors import ModelError
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.model.build.skeleton import Task
from ds_finetune.objectives.objective import Objective

SETTINGS = "ds_finetune"
"""Key of config.json under which a run stores its `objective` and `pooled_token`. That is `last` or `first` if
the hidden state of this token is scored, `mean` for the mean over all tokens.
"""
REWARD = "reward"
"""Name of the objective that trains reward models, and of a reward model's only class."""
_CLASS_SUFFIX = "ForSequenceClassification"
_SPARE = re.compile(r"pad|reserved|unused|placeholder|fim", re.IGNORECASE)
"""Pattern of a tokenizer's reserved tokens, which neither texts nor chat templates use."""
NEW_PADDING = "<|pad|>"
"""The padding token that is added to an exported tokenizer if it has no unused token."""
_UNNAMED = re.compile(r"LABEL_\d+")
_FRESH = ("score.weight", "score.bias")


def is_classifier(config: PretrainedConfig | Mapping[str, Any]) -> bool:
    """Whether a config.json names a model class for sequence classification."""
    names = config.get("architectures") if isinstance(config, Mapping) else config.architectures
    return any(str(name).endswith(_CLASS_SUFFIX) for name in names or ())


def fresh_parameters(base: PretrainedConfig, task: Task, head: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of parameters that the base model may lack, because they belong to a new, randomly initialised
    classification head. `head` has the head's parameters on this rank.
    """
    return (*_FRESH, *head) if task == "sequence_classification" and not is_classifier(base) else ()


def with_base_classes(section: ObjectiveConfig, base: PretrainedConfig) -> ObjectiveConfig:
    """A copy of `section` with the number and names of classes of the classifier `base`, if `section` names none; other
    sections are returned unchanged. ModelError if the numbers of classes differ, or their names are in another order.
    """
    if not isinstance(section, ClassificationObjective) or not is_classifier(base):
        return section
    _check_number(base, section.num_labels or len(section.labels) or base.num_labels)
    names = tuple(str(base.id2label[number]) for number in range(base.num_labels))
    has_names = base.num_labels > 1 and not any(map(_UNNAMED.fullmatch, names))
    if section.labels != names and set(section.labels) == set(names):
        raise ModelError(
            f"objective.labels {', '.join(section.labels)} has another order than the base model's classes, "
            f"{', '.join(names)}",
            hint="leave objective.labels out to use the base model's order",
        )
    labels = section.labels or (names if has_names else ())
    return section.model_copy(update={"labels": labels, "num_labels": base.num_labels})


def _check_number(base: PretrainedConfig, outputs: int) -> None:
    if is_classifier(base) and base.num_labels != outputs:
        raise ModelError(
            f"the base model is a classifier with {base.num_labels} labels, but the run trains {outputs}",
            hint="set model.path to its language model, or train on data with the same labels",
        )


def set_classes(hf_config: PretrainedConfig, section: ObjectiveConfig, *, outputs: int) -> None:
    """Write names and number of the run's classes into `hf_config`. ModelError if it has another number."""
    _check_number(hf_config, outputs)
    names = section.labels if isinstance(section, ClassificationObjective) else (REWARD,)
    hf_config.num_labels = outputs
    hf_config.id2label = dict(enumerate(names or (f"LABEL_{number}" for number in range(outputs))))
    hf_config.label2id = {name: number for number, name in hf_config.id2label.items()}
    # For a regression, transformers' pipeline would by default apply a sigmoid to a single output.
    hf_config.problem_type = "regression" if outputs == 1 else "single_label_classification"


def score_settings(hf_config: PretrainedConfig, objective: Objective) -> dict[str, Any]:
    """config.json keys of an exported classifier: its number of classes and, under `SETTINGS`, keys of this program."""
    encoder = encoder_of(hf_config)
    pooling = None if encoder is None else getattr(hf_config, encoder.pooling_key or "", "cls")
    pooled = {None: "last", "cls": "first"}.get(pooling, str(pooling))
    return {"num_labels": hf_config.num_labels, SETTINGS: {"objective": objective.name, "pooled_token": pooled}}


def set_padding_token(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Choose a classifier's padding token and write it into `hf_config`. Returns a text for the log.

    transformers 5.23 scores the last token that is not padding (modeling_layers.py:186), so no document may end with
    the padding token. Candidates in this order are the padding token of the tokenizer or model, an added token that
    no text contains, and the unknown token, except tokens that begin or end sequences. Without a candidate, a new token
    `NEW_PADDING` gets an id of the vocabulary that the tokenizer does not use. ModelError if there is none.
    """
    eos_ids = hf_config.eos_token_id
    end_ids = {*(eos_ids if isinstance(eos_ids, list) else [eos_ids]), tokenizer.eos_token_id, tokenizer.bos_token_id}
    added = tokenizer.get_added_vocab()
    template = str(tokenizer.chat_template or "")
    spare = sorted(number for text, number in added.items() if _SPARE.search(text) and text not in template)
    candidates = [tokenizer.pad_token_id, hf_config.pad_token_id]
    fitting = [
        number
        for number in [*candidates, *spare, tokenizer.unk_token_id]
        if number is not None and number not in end_ids and 0 <= number < hf_config.vocab_size
    ]
    number = int(fitting[0]) if fitting else _new_id(hf_config, tokenizer)
    hf_config.pad_token_id = number
    if number == tokenizer.pad_token_id:
        return f"{tokenizer.pad_token} ({number})"
    name = tokenizer.convert_ids_to_tokens(number) if fitting else f"{NEW_PADDING}, a new token"
    reason = f"the tokenizer's own, {tokenizer.pad_token}, ends documents" if tokenizer.pad_token else "it has no own"
    return f"{name} ({number}), since {reason}"


def _new_id(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """An id for the new padding token. ModelError if the tokenizer uses every id of the model's vocabulary."""
    tokens = tokenizer.get_vocab()
    number = max(tokens.values()) + 1
    if number < hf_config.vocab_size and NEW_PADDING not in tokens:
        return number
    pad_token, pad = tokenizer.pad_token, tokenizer.pad_token_id
    reason = f"no padding token but {pad_token!r}, which ends documents" if pad_token else "no padding token"
    reason = f"the padding token {pad_token!r} with id {pad}" if pad_token and pad >= hf_config.vocab_size else reason
    raise ModelError(
        f"the tokenizer has {reason}, and its {number} ids leave none of the model's {hf_config.vocab_size} ids for "
        "a padding token. Without one transformers would not score the last token of a text",
        hint=f'write "pad_token": "{NEW_PADDING}" in tokenizer_config.json and set model.resize_vocabulary: true',
    )
