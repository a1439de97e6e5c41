"""Checks that each key of a run file has an effect with the values of the other keys; otherwise it is an error."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.objectives import OBJECTIVES, Head
from ds_finetune.config.run_file import Lines
from ds_finetune.errors import ConfigError

Values = Mapping[str, Any]
"""Every key of a run by its dotted name, defaults filled in."""


@dataclass(frozen=True)
class _KeyRule:
    """Keys, or sections that end in a dot, which have no effect for a `reason`.

    The reason begins with the condition, as `KEY is VALUE`, `KEY is not VALUE` or `there is no KEY`, unless `applies`
    has another one. Values in `harmless` are allowed: they request what happens anyway.
    """

    keys: str
    reason: str
    hint: str
    harmless: tuple[object, ...] = ()
    applies: Callable[[Values], bool] | None = None

    def concerns(self, key: str, value: object) -> bool:
        """Whether the rule is about this key with this value."""
        owns = (key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys.split())
        return any(owns) and value not in self.harmless

    def holds(self, run: Values) -> bool:
        """Whether the reason is true of a run."""
        if self.applies is not None:
            return self.applies(run)
        condition = _CONDITION.match(self.reason)
        assert condition is not None, self.reason
        if absent := condition["absent"]:
            return not run[absent]
        is_value = str(run.get(condition["key"])).lower() == condition["value"]
        return is_value != bool(condition["other"])


_CONDITION = re.compile(r"there is no (?P<absent>[\w.]+)|(?P<key>[\w.]+) is (?P<other>not )?`?(?P<value>\w+)")


def _head(run: Values) -> Head:
    return OBJECTIVES[run["objective.name"]].head


_RULES = (
    _KeyRule("eval.", "there is no data.eval", "set data.eval", (False,)),
    _KeyRule(
        "eval.patience",
        "without eval.every the only evaluation is at the end",
        "set eval.every, e.g. to `100 steps`",
        applies=lambda run: not run["eval.every"],
    ),
    _KeyRule("eval.generate.max_new_tokens", "eval.generate.prompts is 0", "set eval.generate.prompts"),
    _KeyRule(
        "checkpoint.",
        "checkpoint.every is `never`: nothing is saved, and nothing is resumed",
        "set checkpoint.every, e.g. to `500 steps`",
        (False, "never"),
    ),
    _KeyRule(
        "optim.min_lr_ratio",
        "optim.lr_scheduler is constant: the learning rate does not fall",
        "use another lr_scheduler",
    ),
    _KeyRule(
        "optim.warmup", "optim.lr_scheduler is exponential_rise: the learning rate rises all the time", "leave it out"
    ),
    _KeyRule(
        "optim.betas",
        "the optimizer of optim.name has none",
        "use another optimizer",
        applies=lambda run: run["optim.name"].lower() in ("sgd", "adagrad"),
    ),
    _KeyRule(
        "optim.eps",
        "the optimizer of optim.name has none",
        "use another optimizer",
        applies=lambda run: run["optim.name"].lower() in ("sgd", "lion"),
    ),
    _KeyRule(
        "data.workers data.cache_dir",
        "data.streaming prepares and caches nothing",
        "set data.streaming to false",
        applies=lambda run: run["data.streaming"] and not run["data.eval"],
    ),
    _KeyRule(
        "data.train_on data.reasoning data.template",
        "data.layout is text: every token is supervised, and no template is used",
        "set data.layout to auto",
        ("all", "plain"),
    ),
    _KeyRule(
        "data.train_on data.reasoning data.template data.separator",
        "objective is pretrain: every token of plain text is supervised, and no template is used",
        "set objective to sft",
        ("all", "plain"),
        lambda run: run["objective.name"] == "pretrain",
    ),
    _KeyRule(
        "data.train_on",
        "the objective scores whole texts: no token is supervised",
        "set objective to sft",
        applies=lambda run: _head(run) == "scores",
    ),
    _KeyRule(
        "data.train_on",
        "the objective compares answers, which are the last turn of the assistant",
        "set objective to sft",
        ("last_assistant",),
        lambda run: _head(run) == "documents",
    ),
    _KeyRule(
        "data.train_on",
        "the objective trains answers that the model writes",
        "set objective to sft",
        applies=lambda run: _head(run) == "answers",
    ),
    _KeyRule(
        "eval.generate.",
        "the rewards score the answers to held-out prompts",
        "set objective to sft",
        applies=lambda run: _head(run) == "answers",
    ),
    _KeyRule(
        "rollout. rewards",
        "no answers are sampled",
        "set objective to grpo",
        applies=lambda run: "rollout" not in OBJECTIVES[run["objective.name"]].needs,
    ),
    _KeyRule(
        "rollout.address", "rollout.engine is own: the model under training samples", "set rollout.engine to vllm"
    ),
    _KeyRule(
        "objective.clip_low objective.clip_high objective.dual_clip",
        "objective.ratio is capped, which has only an upper bound",
        "set objective.ratio_cap",
    ),
    _KeyRule("objective.fixed_length", "objective.aggregation is not fixed", "set objective.aggregation to fixed"),
    _KeyRule("objective.ratio_cap", "objective.ratio is not capped", "set objective.ratio to capped"),
    _KeyRule(
        "objective.mismatch_cap",
        "objective.mismatch is none: no weight corrects the difference to the sampler",
        "set objective.mismatch to token or geometric",
    ),
    _KeyRule(
        "eval.generate.",
        "the objective trains a model that scores texts and writes none",
        "set objective to sft",
        applies=lambda run: _head(run) == "scores",
    ),
    _KeyRule(
        "objective.label_smoothing",
        "the loss of objective.loss has none",
        "set objective.loss to sigmoid or robust",
        applies=lambda run: run.get("objective.loss", "sigmoid") not in ("sigmoid", "robust"),
    ),
    _KeyRule(
        "objective.label_smoothing",
        "objective.num_labels is 1: a regression has no classes",
        "set objective.num_labels to the number of classes",
    ),
    _KeyRule(
        "objective.loss",
        "objective.label_smoothing is 0, which makes the loss the same as sigmoid",
        "set objective.label_smoothing",
        applies=lambda run: run["objective.loss"] == "robust" and not run["objective.label_smoothing"],
    ),
    _KeyRule("objective.teacher_offload", "there is no objective.teacher", "set objective.teacher"),
    _KeyRule("data.max_truncated_ratio", "data.long_rows is drop: nothing is truncated", "set data.max_dropped_ratio"),
    _KeyRule(
        "train.activation_offload",
        "train.activation_checkpointing is none: layers keep all of their activations",
        "set train.activation_checkpointing to full",
        (False,),
    ),
    _KeyRule("mtp.", "mtp.train is false", "set mtp.train", (False,)),
    _KeyRule("indexer.", "indexer.train is false", "set indexer.train", (False,)),
    _KeyRule("export.formats", "export.at_end is false: nothing is exported at the end", "set export.at_end to true"),
    _KeyRule(
        "export.max_shard_size",
        "export.at_end is false and no best weights are kept: nothing is exported",
        "set export.at_end to true",
        applies=lambda run: not run["export.at_end"] and not (run["data.eval"] and run["eval.keep_best"]),
    ),
)


def check_keys_have_effect(given: Values, run: Values, source: str, lines: Lines) -> None:
    """ConfigError that names the keys of `given` that have no effect in `run`, each with its line and the reason.

    `given` holds only keys that differ from their default, so that a resolved run file, which has every key, is valid.
    """
    messages, hints = [], []
    for key, value in given.items():
        rule = next((rule for rule in _RULES if rule.concerns(key, value) and rule.holds(run)), None)
        if rule is None:
            continue
        line = lines.get(tuple(key.split(".")))
        where = f"{source} line {line}" if line else source
        messages.append(f"{where}: `{key}` is {value!r} and has no effect: {rule.reason}")
        hints.append(f"leave `{key}` out, or {rule.hint}")
    if messages:
        raise ConfigError("; ".join(messages), hint="; ".join(hints))
