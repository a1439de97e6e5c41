"""Refuses documents that are longer than a model with an indexer (DeepSeek sparse attention) attends to."""

from collections.abc import Mapping

import numpy as np

from ds_finetune.config.schema import RunConfig
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import StreamedRows
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.model.indexed_attention import longest_document
from ds_finetune.model.model_plan import ModelPlan


def length_notes(model: ModelPlan) -> tuple[str, ...]:
    """A line on how long documents may be, for people; none where a model sets no limit of its own."""
    limit = _limit(model)
    if limit is None:
        return ()
    return (
        f"documents have at most index_topk {limit} tokens, in which every token attends to all earlier ones: the "
        "indexer is not run",
    )


def check_lengths(
    config: RunConfig, model: ModelPlan, train: PreparedRows | StreamedRows, held_out: Mapping[str, PreparedRows]
) -> None:
    """DataError or ConfigError where model or teacher would attend to all tokens of a document that is longer than its
    `index_topk`, in which the published model chooses some. Rows may be longer, and so may padding.
    """
    limit = _limit(model)
    if limit is None:
        return
    _check_unknown_lengths(config, model, train, limit)
    named = {"train": train, **{name.replace("/", "."): rows for name, rows in held_out.items()}}
    for name, rows in named.items():
        if isinstance(rows, PreparedRows):
            _check_documents(f"data.{name}", rows, limit)
    for name, rows in held_out.items():
        _check_prompts(config, name, rows, limit)


def _limit(model: ModelPlan) -> int | None:
    configs = [model.hf_config, *([model.teacher.hf_config] if model.teacher is not None else [])]
    return min(filter(None, map(longest_document, configs)), default=None)


def _check_unknown_lengths(config: RunConfig, model: ModelPlan, train: PreparedRows | StreamedRows, limit: int) -> None:
    """ConfigError where documents are made during training, and `train.max_seq_len` alone limits them."""
    source = "data.streaming" if isinstance(train, StreamedRows) else f"objective {model.objective.name}"
    if not (isinstance(train, StreamedRows) or model.objective.needs_baseline):
        return
    if config.train.max_seq_len > limit:
        raise ConfigError(
            f"train.max_seq_len {config.train.max_seq_len} is more than the {limit} tokens (index_topk) that the model "
            f"attends to, and the documents of {source} are not known before the run",
            hint=f"set train.max_seq_len: {limit}",
        )


def _check_documents(key: str, rows: PreparedRows, limit: int) -> None:
    lengths = np.diff(rows.documents.offsets)
    too_long = int((lengths > limit).sum())
    if too_long:
        raise DataError(
            f"{key}: {too_long} of {len(lengths)} documents are longer than the {limit} tokens (index_topk) that the "
            f"model attends to, the longest has {lengths.max()}; sparse attention is not trained",
            hint=f"set train.max_seq_len: {limit}; data.long_rows says whether longer documents are cut, split or "
            "dropped",
        )


def _check_prompts(config: RunConfig, name: str, rows: PreparedRows, limit: int) -> None:
    """ConfigError where a prompt with its answer may become too long."""
    generate = config.eval.generate
    if not generate.prompts:
        return
    longest = max((len(prompt) for prompt, _ in rows.prompts_and_answers(generate.prompts)), default=0)
    if longest + generate.max_new_tokens > limit:
        raise ConfigError(
            f"eval.generate: a prompt of {longest} tokens in {name} and max_new_tokens {generate.max_new_tokens} are "
            f"more than the {limit} tokens (index_topk) that the model attends to",
            hint=f"set eval.generate.max_new_tokens to {limit - longest} or less"
            if longest < limit
            else "set eval.generate.prompts: 0",
        )
