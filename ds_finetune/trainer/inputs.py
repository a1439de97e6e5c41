"""Reads a run's inputs on every process, before there is a process group: model config, tokenizer, tokenised rows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import ObjectiveConfig, is_distillation
from ds_finetune.config.rewards import RewardConfig
from ds_finetune.data.prepare import prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.prompt_format import GENERATION, PromptFormat, end_ids
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.data.stream import StreamedRows, open_stream, overlap_notes
from ds_finetune.data.teacher_scores import StoredScores
from ds_finetune.data.tokenizer_files import check_beside, has_vocabulary, load_tokenizer
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.export.fitted_tokenizer import fit_beginning
from ds_finetune.export.safetensors_folder import CHAT_TEMPLATES, tokenizer_files
from ds_finetune.families.text_part import TEXT_CONFIG, is_composite
from ds_finetune.model.adapters.peft_adapter import PeftAdapter
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.model.build.hub_folder import has_weights
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, model_class, read_hf_config, resolve_folder
from ds_finetune.model.build.text_config import check_other_parts
from ds_finetune.model.loss.score_config import score_settings
from ds_finetune.model.loss.teacher import check_same_tokens
from ds_finetune.model.weights.load import weights_digest
from ds_finetune.model.weights.vocabulary import untrained_rows
from ds_finetune.objectives.rewards.pool import check_files
from ds_finetune.objectives.rewards.worker import needs_of
from ds_finetune.plan.config_json import read_config_json
from ds_finetune.plan.context import extend_tree
from ds_finetune.plan.model_tensors import EMBEDDING
from ds_finetune.plan.settings import RunSettings
from ds_finetune.trainer.document_lengths import check_lengths
from ds_finetune.trainer.resolve import limits_of

_STRIP = 2**24
"""Number of training tokens that are scanned at a time."""


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run: model folder and plan, tokenizer, rows. They are read before the process group exists."""

    folder: Path
    model: ModelPlan
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path
    train: PreparedRows | StreamedRows
    prompts: PromptFormat
    held_out: Mapping[str, PreparedRows]
    """Held-out sets by the prefix of their metric names: `eval`, or `eval/NAME` for a named set."""
    scores: StoredScores | None = None
    """Stored distributions of a teacher for the training rows; None without them."""
    teacher: str = ""
    """Digest of the weights of a distillation teacher; empty without one."""
    base: str = ""
    """Digest of the base weights of adapters, or of the reference model's weights; empty without either."""
    notes: tuple[str, ...] = ()
    """Notes about the data, shown at the start of the run."""

    @cached_property
    def config_tree(self) -> dict[str, Any]:
        """The config.json of the run's exports and checkpoints, parsed."""
        model, tree = self.model, config_tree(self.folder, self.model)
        return tree if model.task == "causal_lm" else tree | score_settings(model.hf_config, model.objective)

    @property
    def config_text(self) -> str:
        """The config.json of exports as text: the published file byte for byte if nothing has changed."""
        text = (self.folder / "config.json").read_text(encoding="utf-8")
        return text if json.loads(text) == self.config_tree else json.dumps(self.config_tree, indent=2) + "\n"

    @property
    def pad_token_id(self) -> int:
        """Token id for padding. If the tokenizer has none, any id will do, since padding is not supervised."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    @property
    def stop_ids(self) -> list[int]:
        """Token ids that end an answer of the model and of its export."""
        return end_ids(self.folder, self.model.hf_config, self.tokenizer, self.prompts.ends)

    @cached_property
    def copied_files(self) -> dict[str, Path]:
        """Paths of the files that an export copies beside its weights, by file name."""
        files = tokenizer_files(self.tokenizer_folder)
        if self.prompts.template:
            files = {name: path for name, path in files.items() if "/" not in name and name not in CHAT_TEMPLATES}
        generation = self.folder / GENERATION
        return files | ({GENERATION: generation} if generation.is_file() else {})

    @cached_property
    def beginning(self) -> dict[str, str]:
        """New text of an export's tokenizer.json, by file name, so that texts begin as in training; or empty."""
        files = {name: path for name, path in self.copied_files.items() if name != GENERATION}
        return fit_beginning(self.tokenizer, files, self.prompts, config=self.config_tree)

    def data_notes(self) -> Iterator[str]:
        """Notes about the rows, for the user to read before training."""
        for name, rows in {"train": self.train, **self.held_out}.items():
            yield from (f"data.{name.replace('/', '.')}: {note}" for note in row_notes(rows.counts))


def read_inputs(run: RunSettings, model: ModelPlan) -> RunInputs:
    """Read the tokenizer, and tokenise the data. ModelError, DataError or ConfigError if they are invalid."""
    folder = resolve_folder(run.model.path)
    copies_parts = (run.export.at_end or run.eval.keep_best) and is_composite(read_config_json(str(folder)))
    part_notes = check_other_parts(folder) if copies_parts and has_weights(folder) else ()
    tokenizer_folder = resolve_folder(run.model.tokenizer) if run.model.tokenizer else folder
    tokenizer = load_tokenizer(str(tokenizer_folder))
    if tokenizer_folder != folder:
        check_beside(tokenizer, str(tokenizer_folder), model.hf_config)
    limits = limits_of(run, model.hf_config)
    check_teacher_tokens(model, tokenizer)
    lengths = {"train.for": run.train.duration, "eval.every": run.eval.every, "checkpoint.every": run.checkpoint.every}
    for key, text in lengths.items() if run.data.streaming else ():
        if "epoch" in str(text) or "token" in str(text):
            raise ConfigError(
                f"{key} is `{text}`, and with data.streaming the number of tokens and epochs is not known",
                hint=f"set {key} to a number of steps",
            )
    if run.data.streaming and run.data.weights:
        raise ConfigError(
            f"data.train gives weights to {', '.join(run.data.weights)}, which needs the number of rows, but with "
            "data.streaming it is not known",
            hint="set data.streaming: false, or write the mixed rows to one file",
        )
    check_files(run.rewards)
    kind = RowKind.of(run.objective)
    prepare = partial(prepare_rows, tokenizer=tokenizer, limits=limits, kind=kind)
    stream = partial(open_stream, tokenizer=tokenizer, limits=limits, kind=kind)
    train = (stream if run.data.streaming else prepare)(run.data, "train")
    held_out = {
        name: prepare(run.data.model_copy(update={"eval": paths}), "eval")
        for name, paths in run.data.held_out_sets.items()
    }
    check_lengths(model, train, held_out, max_seq_len=run.train.max_seq_len, generate=run.eval.generate)
    for rows in (train, *held_out.values()):
        check_padding(rows, model, tokenizer)
        if isinstance(rows, PreparedRows) and kind.name == "prompts":
            check_records(run.rewards, rows)
    held_out_notes = [note for rows in held_out.values() for note in rows.notes]
    held_out_notes += overlap_notes(train, held_out) if held_out else []
    base = weights_digest(folder) if _has_base(model) else ""
    prompts = PromptFormat.of_run(run.data, kind, train.counts, tokenizer)
    scores = open_scores(run.objective, model, tokenizer, train)
    return RunInputs(
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        train=train,
        held_out=held_out,
        scores=scores,
        teacher=teacher_digest(model, scores),
        base=base,
        prompts=prompts,
        notes=(
            *part_notes,
            *train.notes,
            *held_out_notes,
            *prompts.notes,
            *start_notes(model, base),
            *untrained_tokens(model, folder, tokenizer, train),
        ),
    )


def start_notes(model: ModelPlan, base: str) -> Iterator[str]:
    """A note if the adapter `lora.start` has no digest of its base model. ConfigError if its digest is not `base`."""
    if model.lora is None or model.lora.section.start is None:
        return
    adapter = PeftAdapter.open(Path(model.lora.section.start))
    if adapter.base and adapter.base != base:
        raise ConfigError(
            f"the adapter lora.start {adapter.folder} was trained from weights with digest {adapter.base}, but the "
            f"weights of model.path {model.path} have {base}",
            hint="set model.path to the model for which the adapter was trained",
        )
    if not adapter.base:
        named = adapter.config.get("base_model_name_or_path")
        yield f"lora.start {adapter.folder} was trained on `{named}`: no digest shows whether it is the run's model"


def untrained_tokens(
    model: ModelPlan, folder: Path, tokenizer: PreTrainedTokenizerBase, rows: PreparedRows | StreamedRows
) -> Iterator[str]:
    """A note if adapters are trained on rows with tokens that the base model in `folder` seems not to know. These are
    tokens that the base model's tokenizer lacks, and added tokens whose embeddings look untrained.
    """
    if model.lora is None or EMBEDDING in model.lora.fully_trained or isinstance(rows, StreamedRows):
        return
    base_tokenizer, seen, ids = tokenizer, np.zeros(model.hf_config.vocab_size, dtype=bool), rows.documents.ids
    if tokenizer.name_or_path != str(folder) and has_vocabulary(folder):
        # If the base model's own tokenizer cannot be read, the run's tokenizer is used instead.
        with suppress(DataError):
            base_tokenizer = load_tokenizer(str(folder))
    for start in range(0, len(ids), _STRIP):
        seen[ids[start : start + _STRIP]] = True
    named, used = set(base_tokenizer.get_vocab().values()), set(np.flatnonzero(seen).tolist())
    added = sorted(used & tokenizer.added_tokens_decoder.keys() & named)
    untrained = [*sorted(used - named), *untrained_rows(folder, added, named)]
    if untrained:
        shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(number)!r} ({number})" for number in untrained[:5])
        yield (
            f"lora trains neither embedding nor head, and the base seems not to have trained those of {len(untrained)} "
            f"tokens of the rows: {shown}{', ...' if untrained[5:] else ''}; lora.modules_to_save can train them"
        )


def check_padding(rows: PreparedRows | StreamedRows, model: ModelPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if a decoder classifies documents and one ends in the padding token: transformers would skip it.
    Streamed rows are not checked, since they are not read before the run.
    """
    is_decoder = model.task == "sequence_classification" and encoder_of(model.hf_config) is None
    if not is_decoder or isinstance(rows, StreamedRows):
        return
    pad, offsets = model.hf_config.pad_token_id, rows.documents.offsets
    ends_in_padding = np.flatnonzero(rows.documents.ids[offsets[1:] - 1] == pad)
    if len(ends_in_padding):
        first = int(ends_in_padding[0])
        text = tokenizer.decode(rows.documents.ids[offsets[first] : offsets[first + 1]])
        raise DataError(
            f"{len(ends_in_padding)} documents end in the padding token {model.padding}, the first is number {first}: "
            f"...{text[-60:]!r}",
            hint="set another pad_token in tokenizer_config.json: transformers would classify by the token before it",
        )


def _has_base(model: ModelPlan) -> bool:
    """Whether a resumed run still needs the published weights: for adapters, frozen weights or a reference model."""
    has_reference = model.objective.needs_reference or model.objective.reference_is_start
    is_partial = model.lora is not None or model.freezing is not None
    return is_partial or (has_reference and not model.has_random_weights)


def config_tree(folder: Path, model: ModelPlan) -> dict[str, Any]:
    """The parsed config.json of the model folder, with the run's vocabulary size, positions and rotary scaling. For a
    classifier, classes, padding token and class name are the run's too.
    """
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hf_config, task = model.hf_config, model.task
    text = dict(tree[TEXT_CONFIG] if is_composite(tree) else tree)
    if hf_config.vocab_size != read_hf_config(str(folder), task=task).vocab_size:
        text["vocab_size"] = int(hf_config.vocab_size)
    if model.context is not None and model.context.is_extended:
        text = extend_tree(text, model.context)
    tree = {**tree, TEXT_CONFIG: text} if is_composite(tree) else text
    if task == "sequence_classification":
        tree["architectures"] = [model_class(hf_config, task).__name__]
        tree |= {key: getattr(hf_config, key) for key in ("id2label", "label2id", "problem_type", "pad_token_id")}
        tree["id2label"] = {str(number): name for number, name in hf_config.id2label.items()}
    return tree


def check_teacher_tokens(model: ModelPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the teacher's tokenizer has other tokens than the run's, DataError if it is missing."""
    if model.teacher is not None:
        folder = resolve_folder(model.teacher.path, files=TOKENIZER_PATTERNS)
        teacher_tokenizer = load_tokenizer(str(folder))
        check_same_tokens(model.teacher, teacher_tokenizer.get_vocab(), tokenizer.get_vocab())


def open_scores(
    section: ObjectiveConfig, model: ModelPlan, tokenizer: PreTrainedTokenizerBase, rows: PreparedRows | StreamedRows
) -> StoredScores | None:
    """The stored teacher scores that the objective names. DataError if they are damaged or belong to other rows."""
    if not is_distillation(section) or section.scores is None:
        return None
    assert isinstance(rows, PreparedRows)
    scores = StoredScores.open(Path(section.scores))
    scores.check(rows.documents, tokenizer.get_vocab(), int(model.hf_config.vocab_size))
    return scores


def teacher_digest(model: ModelPlan, scores: StoredScores | None) -> str:
    """Digest of the teacher's weights, by which a resumed run recognises the teacher; empty without a teacher."""
    if scores is not None:
        return scores.identity.teacher
    return weights_digest(resolve_folder(model.teacher.path)) if model.teacher is not None else ""


def unusable_record(sections: Sequence[RewardConfig], rows: PreparedRows) -> str:
    """The first record that a reward cannot use, with the reward's message; empty if all records are usable."""
    rewards = [section.settings for section in sections]
    problems = ((number, needs_of(rewards, rows.record(number))) for number in range(len(rows)))
    return next((f"{rows.where(number)}: {problem}" for number, problem in problems if problem), "")


def check_records(sections: Sequence[RewardConfig], rows: PreparedRows) -> None:
    """Raise DataError for the first record that a reward cannot use. Called before the first rollout."""
    if problem := unusable_record(sections, rows):
        raise DataError(
            f"the rewards cannot use a row of the data: {problem}",
            hint="correct the row, or set the key `column` of the reward to another column",
        )
