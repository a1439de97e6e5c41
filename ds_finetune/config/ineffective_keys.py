"""Checks that each key of a run file has an effect with the values of the other keys; otherwise it is an error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.objectives import OBJECTIVES, ObjectiveRow
from ds_finetune.config.run_file import Lines
from ds_finetune.errors import ConfigError

Values = Mapping[str, Any]
"""Every key of a run by its dotted name, defaults filled in."""


@dataclass(frozen=True)
class _KeyRule:
    """Keys (or sections, ending in a dot) that have no effect where `applies` returns true.

    Values in `harmless` are allowed: they request what happens anyway.
    """

    keys: tuple[str, ...]
    applies: Callable[[Values], bool]
    reason: str
    hint: str
    harmless: tuple[object, ...] = ()

    def concerns(self, key: str, value: object) -> bool:
        """Whether the rule is about this key with this value."""
        return (
            any(key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys)
            and value not in self.harmless
        )


def _row(run: Values) -> ObjectiveRow:
    return OBJECTIVES[run["objective.name"]]


_RULES = (
    _KeyRule(("eval.",), lambda run: not run["data.eval"], "there is no data.eval", "set data.eval", harmless=(False,)),
    _KeyRule(
        ("eval.patience",),
        lambda run: not run["eval.every"],
        "without eval.every the only evaluation is at the end",
        "set eval.every, e.g. to `100 steps`",
    ),
    _KeyRule(
        ("eval.generate.max_new_tokens",),
        lambda run: not run["eval.generate.prompts"],
        "eval.generate.prompts is 0",
        "set eval.generate.prompts",
    ),
    _KeyRule(
        ("checkpoint.",),
        lambda run: run["checkpoint.every"] == "never",
        "checkpoint.every is `never`: nothing is saved, and nothing is resumed",
        "set checkpoint.every, e.g. to `500 steps`",
        harmless=(False, "never"),
    ),
    _KeyRule(
        ("optim.min_lr_ratio",),
        lambda run: run["optim.lr_scheduler"] == "constant",
        "optim.lr_scheduler is constant: the learning rate does not fall",
        "use another lr_scheduler",
    ),
    _KeyRule(
        ("optim.warmup",),
        lambda run: run["optim.lr_scheduler"] == "exponential_rise",
        "optim.lr_scheduler is exponential_rise: the learning rate rises all the time",
        "leave it out",
    ),
    _KeyRule(
        ("optim.betas",),
        lambda run: run["optim.name"].lower() in ("sgd", "adagrad"),
        "the optimizer of optim.name has none",
        "use another optimizer",
    ),
    _KeyRule(
        ("optim.eps",),
        lambda run: run["optim.name"].lower() in ("sgd", "lion"),
        "the optimizer of optim.name has none",
        "use another optimizer",
    ),
    _KeyRule(
        ("data.workers", "data.cache_dir"),
        lambda run: run["data.streaming"] and not run["data.eval"],
        "data.streaming prepares and caches nothing",
        "set data.streaming to false",
    ),
    _KeyRule(
        ("data.train_on", "data.reasoning", "data.template"),
        lambda run: run["data.layout"] == "text",
        "data.layout is text: every token is supervised, and no template is used",
        "set data.layout to auto",
        harmless=("all", "plain"),
    ),
    _KeyRule(
        ("data.train_on", "data.reasoning", "data.template", "data.separator"),
        lambda run: run["objective.name"] == "pretrain",
        "objective is pretrain: every token of plain text is supervised, and no template is used",
        "set objective to sft",
        harmless=("all", "plain"),
    ),
    _KeyRule(
        ("data.train_on",),
        lambda run: _row(run).head == "scores",
        "the objective scores whole texts: no token is supervised",
        "set objective to sft",
    ),
    _KeyRule(
        ("data.train_on",),
        lambda run: _row(run).head == "documents",
        "the objective compares answers, which are the last turn of the assistant",
        "set objective to sft",
        harmless=("last_assistant",),
    ),
    _KeyRule(
        ("data.train_on",),
        lambda run: _row(run).head == "answers",
        "the objective trains answers that the model writes",
        "set objective to sft",
    ),
    _KeyRule(
        ("eval.generate.",),
        lambda run: _row(run).head == "answers",
        "the rewards score the answers to held-out prompts",
        "set objective to sft",
    ),
    _KeyRule(
        ("rollout.", "rewards"),
        lambda run: "rollout" not in _row(run).needs,
        "no answers are sampled",
        "set objective to grpo",
    ),
    _KeyRule(
        ("rollout.address",),
        lambda run: run["rollout.engine"] == "own",
        "rollout.engine is own: the model under training samples",
        "set rollout.engine to vllm",
    ),
    _KeyRule(
        ("objective.clip_low", "objective.clip_high", "objective.dual_clip"),
        lambda run: run["objective.ratio"] == "capped",
        "objective.ratio is capped, which has only an upper bound",
        "set objective.ratio_cap",
    ),
    _KeyRule(
        ("objective.fixed_length",),
        lambda run: run["objective.aggregation"] != "fixed",
        "objective.aggregation is not fixed",
        "set objective.aggregation to fixed",
    ),
    _KeyRule(
        ("objective.ratio_cap",),
        lambda run: run["objective.ratio"] != "capped",
        "objective.ratio is not capped",
        "set objective.ratio to capped",
    ),
    _KeyRule(
        ("objective.mismatch_cap",),
        lambda run: run["objective.mismatch"] == "none",
        "objective.mismatch is none: no weight corrects the difference to the sampler",
        "set objective.mismatch to token or geometric",
    ),
    _KeyRule(
        ("eval.generate.",),
        lambda run: _row(run).head == "scores",
        "the objective trains a model that scores texts and writes none",
        "set objective to sft",
    ),
    _KeyRule(
        ("objective.label_smoothing",),
        lambda run: run.get("objective.loss", "sigmoid") not in ("sigmoid", "robust"),
        "the loss of objective.loss has none",
        "set objective.loss to sigmoid or robust",
    ),
    _KeyRule(
        ("objective.label_smoothing",),
        lambda run: run.get("objective.num_labels") == 1,
        "objective.num_labels is 1: a regression has no classes",
        "set objective.num_labels to the number of classes",
    ),
    _KeyRule(
        ("objective.loss",),
        lambda run: run["objective.loss"] == "robust" and not run["objective.label_smoothing"],
        "objective.label_smoothing is 0, which makes the loss the same as sigmoid",
        "set objective.label_smoothing",
    ),
    _KeyRule(
        ("objective.teacher_offload",),
        lambda run: not run["objective.teacher"],
        "there is no objective.teacher",
        "set objective.teacher",
    ),
    _KeyRule(
        ("data.max_truncated_ratio",),
        lambda run: run["data.long_rows"] == "drop",
        "data.long_rows is drop: nothing is truncated",
        "set data.max_dropped_ratio",
    ),
    _KeyRule(
        ("train.activation_offload",),
        lambda run: run["train.activation_checkpointing"] == "none",
        "train.activation_checkpointing is none: layers keep all of their activations",
        "set train.activation_checkpointing to full",
        harmless=(False,),
    ),
    _KeyRule(("mtp.",), lambda run: not run["mtp.train"], "mtp.train is false", "set mtp.train", harmless=(False,)),
    _KeyRule(
        ("indexer.",),
        lambda run: not run["indexer.train"],
        "indexer.train is false",
        "set indexer.train",
        harmless=(False,),
    ),
    _KeyRule(
        ("export.formats",),
        lambda run: not run["export.at_end"],
        "export.at_end is false: nothing is exported at the end",
        "set export.at_end to true",
    ),
    _KeyRule(
        ("export.max_shard_size",),
        lambda run: not run["export.at_end"] and not (run["data.eval"] and run["eval.keep_best"]),
        "export.at_end is false and no best weights are kept: nothing is exported",
        "set export.at_end to true",
    ),
)


def check_keys_have_effect(given: Values, run: Values, source: str, lines: Lines) -> None:
    """ConfigError that names the keys of `given` that have no effect in `run`, each with its line and the reason.

    `given` holds only keys that differ from their default, so that a resolved run file, which has every key, is valid.
    """
    messages, hints = [], []
    for key, value in given.items():
        rule = next((rule for rule in _RULES if rule.concerns(key, value) and rule.applies(run)), None)
        if rule is None:
            continue
        line = lines.get(tuple(key.split(".")))
        where = f"{source} line {line}" if line else source
        messages.append(f"{where}: `{key}` is {value!r} and has no effect: {rule.reason}")
        hints.append(f"leave `{key}` out, or {rule.hint}")
    if messages:
        raise ConfigError("; ".join(messages), hint="; ".join(hints))
