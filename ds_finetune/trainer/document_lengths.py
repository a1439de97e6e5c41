"""Refuses documents and answers that are too long for a model.

For models with an indexer (DeepSeek sparse attention), it refuses documents in which the model would attend to other
tokens than the published implementation. Answers must not exceed a model's positions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ds_finetune.config.sections import OWN_ATTENTIONS, GenerateConfig
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import StreamedRows
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.model.attention.indexed_attention import longest_document
from ds_finetune.model.build.encoder import max_positions
from ds_finetune.model.build.model_plan import ModelPlan


@dataclass(frozen=True)
class DocumentLimit:
    """Maximum number of tokens of a document, with the reason and a hint."""

    tokens: int
    reason: str
    hint: str
    holds_for_answers: bool = False
    """Whether the limit also applies to prompts with their generated answers."""


def length_notes(model: ModelPlan, *, max_seq_len: int) -> tuple[str, ...]:
    """Plan line on whether tokens attend to all earlier tokens of a document; none for models without an indexer."""
    tokens = longest_document(model.hf_config)
    if tokens is None:
        return ()
    if model.family.compresses:
        limit = f"index_topk {model.hf_config.index_topk} entries"
        if model.indexer is not None and model.indexer.trains_only_indexers:
            return (f"all entries are attended to, also in documents of more than {tokens} tokens, {limit}",)
        runs = "trained" if model.indexer else "run, and not trained" if max_seq_len > tokens else "not run"
        return (f"up to {tokens} tokens, {limit}, the indexer leaves nothing out; it is {runs}",)
    if model.indexer is not None and model.indexer.trains_only_indexers:
        return (
            f"documents are attended to in full, also those longer than index_topk {tokens}: only indexers are trained",
        )
    if max_seq_len > tokens and next(_limits(model), None) is None:
        trained = "not trained" if model.indexer is None else "trained"
        return (f"in documents longer than index_topk {tokens} the indexer chooses tokens; it is {trained}",)
    run = "not run" if model.indexer is None else "trained"
    return (f"documents have at most index_topk {tokens} tokens and are attended to in full: the indexer is {run}",)


def check_lengths(
    model: ModelPlan,
    train: PreparedRows | StreamedRows,
    held_out: Mapping[str, PreparedRows],
    *,
    max_seq_len: int,
    generate: GenerateConfig,
) -> None:
    """Raise DataError or ConfigError if a document, or a held-out prompt with its answer, is longer than a limit. A row
    may be longer.
    """
    named = {"train": train, **{name.replace("/", "."): rows for name, rows in held_out.items()}}
    prompts = {name: _longest_prompt(generate, rows) for name, rows in held_out.items()}
    for limit in _limits(model):
        is_streamed = isinstance(train, StreamedRows)
        if max_seq_len > limit.tokens and (is_streamed or model.objective.needs_baseline):
            source = "data.streaming" if is_streamed else f"objective {model.objective.name}"
            raise ConfigError(
                f"train.max_seq_len {max_seq_len} is more than index_topk {limit.tokens}: with {source} the lengths "
                f"are not known before the run, and on longer documents sparse attention {limit.reason} is not tested",
                hint=f"set train.max_seq_len: {limit.tokens}, or {limit.hint}",
            )
        for name, rows in named.items():
            if isinstance(rows, PreparedRows):
                _check_documents(f"data.{name}", rows, limit)
        for name, longest in prompts.items() if limit.holds_for_answers else ():
            if longest and longest + generate.max_new_tokens > limit.tokens:
                raise ConfigError(
                    f"eval.generate: a prompt of {longest} tokens in {name} and max_new_tokens "
                    f"{generate.max_new_tokens} add up to more than index_topk {limit.tokens}, for which sparse "
                    f"attention {limit.reason} is not tested",
                    hint=f"set {limit.hint}, or fewer max_new_tokens",
                )
    _check_answers_fit(model, generate, prompts)


def _limits(model: ModelPlan) -> Iterator[DocumentLimit]:
    """Maximum lengths of documents for a model with an indexer; longer ones are not tested with the run's settings."""
    tokens = longest_document(model.hf_config)
    if tokens is not None:
        if model.attention not in OWN_ATTENTIONS:
            where = f"with model.attention {model.attention}"
            yield DocumentLimit(tokens, where, "model.attention: sdpa", holds_for_answers=True)
        types = getattr(model.hf_config, "indexer_types", None) or ()
        chunks = [chunk for layers in model.stages if layers is not None for chunk in layers.chunks]
        # If a rank's chunk begins with a layer without an indexer, an indexer on another rank has chosen its tokens.
        for layer in (chunk[0] for chunk in chunks if types and types[chunk[0]] == "shared"):
            where = f"where a stage of parallel.pp {len(model.stages)} begins with layer {layer}, without an indexer"
            yield DocumentLimit(tokens, where, "parallel.pp: 1, or other parallel.pp_layers", holds_for_answers=True)
    if model.teacher is not None:
        tokens = longest_document(model.teacher.hf_config)
        if tokens is not None:
            yield DocumentLimit(tokens, f"with the teacher {model.teacher.path}", "another teacher")


def _check_documents(key: str, rows: PreparedRows, limit: DocumentLimit) -> None:
    lengths = np.diff(rows.documents.offsets)
    too_long = int((lengths > limit.tokens).sum())
    if too_long:
        raise DataError(
            f"{key}: {too_long} of {len(lengths)} documents are longer than index_topk {limit.tokens} (the longest has "
            f"{lengths.max()} tokens), and on them sparse attention {limit.reason} is not tested",
            hint=f"set {limit.hint}; or set train.max_seq_len: {limit.tokens}, so that data.long_rows decides whether "
            "longer documents are cut, split or dropped",
        )


def _check_answers_fit(model: ModelPlan, generate: GenerateConfig, prompts: Mapping[str, int]) -> None:
    """Raise ConfigError if the longest prompt of a held-out set and its answer may exceed the model's positions.
    `prompts` maps the sets to the tokens of these prompts.
    """
    allowed = max_positions(model.hf_config)
    for name, longest in prompts.items():
        if allowed and longest and longest + generate.max_new_tokens > allowed:
            raise ConfigError(
                f"eval.generate: a prompt of {longest} tokens in {name} and max_new_tokens {generate.max_new_tokens} "
                f"add up to more than the {allowed} positions of {model.path}",
                hint=f"set eval.generate.max_new_tokens to {allowed - longest} or less"
                if longest < allowed
                else "leave eval.generate out",
            )


def _longest_prompt(generate: GenerateConfig, rows: PreparedRows) -> int:
    """Number of tokens of the longest held-out prompt that evaluations answer; 0 if they answer none."""
    number = generate.prompts
    return max((len(prompt) for prompt, _ in rows.prompts_and_answers(number)), default=0) if number else 0
