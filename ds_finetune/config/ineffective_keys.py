"""Refuses keys of a run file that have no effect because of the values of other keys."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ds_finetune.config.objectives import OBJECTIVES, Head
from ds_finetune.config.run_file import Lines
from ds_finetune.errors import ConfigError


class NoEffectError(ConfigError):
    """Keys of the run file are valid, but have no effect because of the values of other keys."""


Values = Mapping[str, Any]
"""Values of all keys of a run by dotted name, with defaults filled in."""


def _is(key: str, value: object, reason: str = "", *, negated: bool = False) -> tuple[Callable[[Values], bool], str]:
    """A rule's condition, and its text for messages, which ends with `reason`. With a `value` of None, the condition is
    that `key` is empty; else it is `key == value`, or `key != value` if `negated`.
    """
    shown = str(value).lower() if isinstance(value, bool) else value
    text = f"there is no {key}" if value is None else f"{key} is {'not ' * negated}{shown}"

    def applies(run: Values) -> bool:
        return not run[key] if value is None else (run.get(key) == value) != negated

    return applies, f"{text}: {reason}" if reason else text


class _KeyRule(NamedTuple):
    """Rule that the run-file keys `keys` have no effect in runs for which `applies` is true, because of `reason`.

    `keys` is one text with spaces between the keys; a key that ends in a dot is a whole section. Values in `harmless`
    are not refused, since they say what happens anyway.
    """

    keys: str
    applies: Callable[[Values], bool]
    reason: str
    hint: str
    harmless: tuple[object, ...] = ()

    def concerns(self, key: str, value: object) -> bool:
        """Whether the rule forbids `value` for this key."""
        owns = (key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys.split())
        return any(owns) and value not in self.harmless


def _head(run: Values) -> Head:
    return OBJECTIVES[run["objective.name"]].head


_RULES = (
    _KeyRule("eval.", *_is("data.eval", None), "set data.eval", (False,)),
    _KeyRule(
        "eval.patience",
        lambda run: not run["eval.every"],
        "without eval.every the only evaluation is at the end",
        "set eval.every, e.g. to `100 steps`",
    ),
    _KeyRule("eval.generate.max_new_tokens", *_is("eval.generate.prompts", 0), "set eval.generate.prompts"),
    _KeyRule(
        "checkpoint.",
        *_is("checkpoint.every", "never", "nothing is saved, and nothing is resumed"),
        "set checkpoint.every, e.g. to `500 steps`",
        (False, "never"),
    ),
    _KeyRule(
        "optim.min_lr_ratio",
        *_is("optim.lr_scheduler", "constant", "the learning rate does not fall"),
        "use another lr_scheduler",
    ),
    _KeyRule(
        "optim.warmup",
        *_is("optim.lr_scheduler", "exponential_rise", "the learning rate rises all the time"),
        "use another lr_scheduler",
    ),
    _KeyRule(
        "optim.betas",
        lambda run: run["optim.name"].lower() in ("sgd", "adagrad", "rmsprop", "adafactor"),
        "the optimizer of optim.name has no betas",
        "use another optimizer",
    ),
    _KeyRule(
        "optim.eps",
        lambda run: run["optim.name"].lower() in ("sgd", "lion", "adafactor"),
        "the optimizer of optim.name has no eps",
        "use another optimizer",
    ),
    _KeyRule(
        "data.workers data.cache_dir",
        lambda run: run["data.streaming"] and not run["data.eval"],
        "data.streaming prepares and caches nothing",
        "set data.streaming: false",
    ),
    _KeyRule(
        "data.train_on data.reasoning data.template",
        *_is("data.layout", "text", "every token is supervised, and no template is used"),
        "set data.layout: auto",
        ("all", "plain"),
    ),
    _KeyRule(
        "data.train_on data.reasoning data.template data.separator",
        lambda run: run["objective.name"] == "pretrain",
        "objective is pretrain: every token of plain text is supervised, and no template is used",
        "set objective: sft",
        ("all", "plain"),
    ),
    _KeyRule(
        "data.train_on",
        lambda run: _head(run) == "scores",
        "the objective scores whole texts: no token is supervised",
        "set objective: sft",
    ),
    _KeyRule(
        "data.train_on",
        lambda run: _head(run) == "documents",
        "the objective compares answers, which are the last turn of the assistant",
        "set objective: sft",
        ("last_assistant",),
    ),
    _KeyRule(
        "data.train_on",
        lambda run: _head(run) == "answers",
        "the objective trains answers that the model writes",
        "set objective: sft",
    ),
    _KeyRule(
        "eval.generate.",
        lambda run: _head(run) == "answers",
        "the rewards score the answers to held-out prompts",
        "set objective: sft",
    ),
    _KeyRule(
        "rollout. rewards",
        lambda run: "rollout" not in OBJECTIVES[run["objective.name"]].needs,
        "no answers are sampled",
        "set objective: grpo",
    ),
    _KeyRule(
        "rollout.address",
        *_is("rollout.engine", "own", "the model under training samples the answers"),
        "set rollout.engine: vllm",
    ),
    _KeyRule(
        "objective.clip_low objective.clip_high objective.dual_clip",
        *_is("objective.ratio", "capped", "its only bound is objective.ratio_cap"),
        "set objective.ratio_cap",
    ),
    _KeyRule(
        "objective.fixed_length",
        *_is("objective.aggregation", "fixed", negated=True),
        "set objective.aggregation: fixed",
    ),
    _KeyRule("objective.ratio_cap", *_is("objective.ratio", "capped", negated=True), "set objective.ratio: capped"),
    _KeyRule(
        "objective.mismatch_cap",
        *_is("objective.mismatch", "none", "no weight corrects the difference to the sampler"),
        "set objective.mismatch to token or geometric",
    ),
    _KeyRule(
        "eval.generate.",
        lambda run: _head(run) == "scores",
        "the objective trains a model that scores texts and writes none",
        "set objective: sft",
    ),
    _KeyRule(
        "objective.label_smoothing",
        lambda run: run.get("objective.loss", "sigmoid") not in ("sigmoid", "robust"),
        "the loss of objective.loss has no label smoothing",
        "set objective.loss to sigmoid or robust",
    ),
    _KeyRule(
        "objective.label_smoothing",
        *_is("objective.num_labels", 1, "a regression has no classes"),
        "set objective.num_labels to the number of classes",
    ),
    _KeyRule(
        "objective.loss",
        lambda run: run["objective.loss"] == "robust" and not run["objective.label_smoothing"],
        "objective.label_smoothing is 0, which makes the loss the same as sigmoid",
        "set objective.label_smoothing",
    ),
    _KeyRule("objective.teacher_offload", *_is("objective.teacher", None), "set objective.teacher"),
    _KeyRule(
        "data.max_truncated_ratio", *_is("data.long_rows", "drop", "nothing is truncated"), "set data.max_dropped_ratio"
    ),
    _KeyRule(
        "train.activation_offload",
        *_is("train.activation_checkpointing", "none", "layers keep all of their activations"),
        "set train.activation_checkpointing: full",
        (False,),
    ),
    _KeyRule("mtp.", *_is("mtp.train", False), "set mtp.train", (False,)),
    _KeyRule("indexer.", *_is("indexer.train", False), "set indexer.train", (False,)),
    _KeyRule(
        "export.formats", *_is("export.at_end", False, "nothing is exported at the end"), "set export.at_end: true"
    ),
    _KeyRule(
        "export.max_shard_size",
        lambda run: not run["export.at_end"] and not (run["data.eval"] and run["eval.keep_best"]),
        "export.at_end is false and no best weights are kept: nothing is exported",
        "set export.at_end: true",
    ),
)


def check_keys_have_effect(given: Values, run: Values, source: str, lines: Lines) -> None:
    """Raise a NoEffectError that names each key of `given` without an effect in `run`, with its line and the reason.

    `given` must hold only values that differ from the default: a resolved run file names all keys and must be accepted.
    """
    ineffective_keys, remedies = [], []
    for key, value in given.items():
        rule = next((rule for rule in _RULES if rule.concerns(key, value) and rule.applies(run)), None)
        if rule is None:
            continue
        line = lines.get(tuple(key.split(".")))
        where = f"{source} line {line}" if line else source
        ineffective_keys.append(f"{where}: `{key}` is {value!r} and has no effect: {rule.reason}")
        remedies.append(f"leave `{key}` out, or {rule.hint}")
    if ineffective_keys:
        raise NoEffectError("; ".join(ineffective_keys), hint="; ".join(remedies))
