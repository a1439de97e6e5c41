"""Reads a run's inputs, on every process, before a process group exists: model config, tokenizer, tokenised rows."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.config.objectives import ClassificationObjective
from ds_finetune.config.schedule import Duration
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.classes import find_classes
from ds_finetune.data.overlap import overlap_notes
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.data.scores import StoredScores
from ds_finetune.data.stream import StreamedRows, open_stream
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.model.build.encoder import encoder_of, max_positions
from ds_finetune.model.build.generic_check import check_generic_type
from ds_finetune.model.build.model_plan import ModelPlan, plan_model, task_of
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, model_class, read_hf_config, resolve_folder
from ds_finetune.model.loss.score_config import score_settings, set_classes, set_padding_token, with_base_classes
from ds_finetune.model.mtp.layer import mtp_layers
from ds_finetune.model.weights.load import weights_digest
from ds_finetune.model.weights.vocabulary import grow_vocabulary
from ds_finetune.objectives.distill import Distillation
from ds_finetune.objectives.objective import ScoreObjective, TokenObjective
from ds_finetune.objectives.table import make_objective
from ds_finetune.plan.context import ContextPlan, extend_tree, plan_context
from ds_finetune.plan.distillation import check_teacher
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.model_checks import check_model, check_positions
from ds_finetune.plan.model_shape import Shape
from ds_finetune.trainer.distillation import check_teacher_tokens, open_scores, teacher_digest
from ds_finetune.trainer.document_lengths import check_answers_fit, check_lengths


@dataclass(frozen=True)
class RunInputs:
    """What a run reads before its process group exists: model folder and plan, tokenizer, training and held-out rows.

    `shape` is None for model types whose parameters are not known by arithmetic.
    """

    folder: Path
    model: ModelPlan
    shape: Shape | None
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path
    train: PreparedRows | StreamedRows
    held_out: Mapping[str, PreparedRows]
    """Held-out sets by the first part of their metric names: `eval`, or `eval/NAME` for named ones."""
    scores: StoredScores | None = None
    """Stored distributions of a teacher for the training rows."""
    teacher: str = ""
    """Digest of the weights of the teacher of a distillation."""
    base: str = ""
    """Digest of the weights that adapters are trained on, or that the reference model has; empty where neither is."""
    notes: tuple[str, ...] = ()
    """Lines about the data for people, shown at the start."""

    @property
    def hf_config(self) -> PretrainedConfig:
        """The configuration of the model as it is trained."""
        return self.model.hf_config

    @cached_property
    def config_tree(self) -> dict[str, Any]:
        """The model's config.json, for exports and checkpoints of this run."""
        tree = config_tree(self.folder, self.model)
        return tree if self.model.task == "causal_lm" else tree | score_settings(self.hf_config, self.model.objective)

    @property
    def config_text(self) -> str:
        """The same as a file: the published one byte for byte, where nothing of it is changed."""
        text = (self.folder / "config.json").read_text(encoding="utf-8")
        return text if json.loads(text) == self.config_tree else json.dumps(self.config_tree, indent=2) + "\n"

    @property
    def pad_token_id(self) -> int:
        """Id that fills rows; it carries no loss, so any id will do where the tokenizer names none."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end an answer: the model's and the tokenizer's end of sequence."""
        given = self.hf_config.eos_token_id
        ids = list(given) if isinstance(given, list) else [given]
        return sorted({int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None})

    def data_notes(self) -> Iterator[str]:
        """Lines that a user should read about the rows before they are trained."""
        for name, rows in {"train": self.train, **self.held_out}.items():
            yield from (f"data.{name.replace('/', '.')}: {note}" for note in row_notes(rows.counts))


def read_inputs(config: RunConfig, model: ModelPlan) -> RunInputs:
    """Read the tokenizer and tokenise the data; ModelError, DataError or ConfigError say what is wrong with them."""
    folder = resolve_folder(config.model.path)
    tokenizer_folder = resolve_folder(config.model.tokenizer) if config.model.tokenizer else folder
    tokenizer = load_tokenizer(str(tokenizer_folder))
    limits = token_limits(config, model.hf_config)
    check_teacher_tokens(model, tokenizer)
    if config.data.streaming and Duration.parse(config.train.duration).unit != "steps":
        raise ConfigError(
            f"data.streaming does not know how long `{config.train.duration}` is", hint="give train.for in steps"
        )
    if config.data.streaming and config.data.weights:
        raise ConfigError(
            f"data.train gives weights to {', '.join(config.data.weights)}, whose rows data.streaming does not count",
            hint="set data.streaming to false, or write the rows of a mixture to one file",
        )
    kind = find_classes(config.data, RowKind.of(config.objective))
    prepare = partial(prepare_rows, tokenizer=tokenizer, limits=limits, kind=kind)
    stream = partial(open_stream, tokenizer=tokenizer, limits=limits, kind=kind)
    train = (stream if config.data.streaming else prepare)(config.data, "train")
    held_out = {
        name: prepare(config.data.model_copy(update={"eval": paths}), "eval")
        for name, paths in config.data.held_out_sets.items()
    }
    check_lengths(config, model, train, held_out)
    check_answers_fit(config, model, held_out)
    for rows in (train, *held_out.values()):
        check_padding(rows, model, tokenizer)
    held_out_notes = [note for rows in held_out.values() for note in rows.notes]
    held_out_notes += overlap_notes(train, held_out) if held_out else []
    scores = open_scores(config, model, tokenizer, train)
    return RunInputs(
        folder=folder,
        model=model,
        shape=_shape(folder, model),
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        train=train,
        held_out=held_out,
        scores=scores,
        teacher=teacher_digest(model, scores),
        base=weights_digest(folder) if _has_base(model) else "",
        notes=(*train.notes, *held_out_notes),
    )


def check_padding(rows: PreparedRows | StreamedRows, model: ModelPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """DataError where a document that a decoder scores ends in the padding token, which transformers would pass over.

    A stream is not read before the run.
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
            hint="name another pad_token in tokenizer_config.json; transformers would score the token before it",
        )


def _has_base(model: ModelPlan) -> bool:
    """Whether a run depends on the weights of its model beyond its beginning."""
    return model.lora is not None or (model.objective.needs_reference and not model.has_random_weights)


def make_model_plan(config: RunConfig, mesh: Mesh, *, is_config_alone: bool = False) -> ModelPlan:
    """The model that `config` trains, checked against `mesh`; ConfigError or ModelError where it cannot be built so.

    With `is_config_alone`, only configuration and tokenizer files of a model on the hub are downloaded.
    """
    hf_config = model_config(config, is_config_alone=is_config_alone)
    padding = _set_up_scores(config, hf_config)
    check_model(config, mesh, hf_config.to_dict())
    planned = plan_model(hf_config, config)
    if planned.teacher is not None:
        teacher = planned.teacher.hf_config.to_dict()
        check_teacher(mesh, planned.teacher.path, teacher, max_seq_len=config.train.max_seq_len)
    return replace(planned, padding=padding, context=_context_plan(config, is_config_alone=is_config_alone))


def _set_up_scores(config: RunConfig, hf_config: PretrainedConfig) -> str:
    """Write classes and padding token into the configuration of a classifier or reward model; returns a text on the
    padding token, empty for a causal LM.
    """
    objective = make_objective(config.objective)
    if not isinstance(objective, ScoreObjective):
        return ""
    _check_optimizer_of_scores(config)
    set_classes(hf_config, config.objective, outputs=objective.num_outputs)
    if encoder_of(hf_config) is not None:
        return f"{hf_config.pad_token_id}, as published"
    return set_padding_token(hf_config, _tokenizer_alone(config))


def _check_optimizer_of_scores(config: RunConfig) -> None:
    """ConfigError for Muon, which would orthogonalise the score head: DeepSpeed 0.19.8 knows heads by the name
    `lm_head` (__init__.py:369).
    """
    if config.optim.name.lower() == "muon":
        raise ConfigError(
            f"optim.name {config.optim.name} with objective {config.objective.name} would orthogonalise the score head",
            hint="set optim.name: AdamW",
        )


def with_classes(config: RunConfig) -> RunConfig:
    """The run file with number and names of the classes filled in: those of a base model that is a classifier, else
    those of the training rows, which are read where it is necessary.
    """
    section = known_classes(config).objective
    if not isinstance(section, ClassificationObjective):
        return config
    kind = find_classes(config.data, RowKind.of(section))
    named = section.model_copy(update={"labels": kind.labels, "num_labels": kind.num_labels})
    return config.model_copy(update={"objective": named})


def known_classes(config: RunConfig, *, is_config_alone: bool = False) -> RunConfig:
    """The same without reading rows: from the base model alone."""
    if not isinstance(config.objective, ClassificationObjective):
        return config
    files = {"files": ("*.json",)} if is_config_alone else {}
    base = read_hf_config(config.model.path, **files, task="sequence_classification")
    return config.model_copy(update={"objective": with_base_classes(config.objective, base)})


def try_generic_type(config: RunConfig, model: ModelPlan) -> tuple[str, ...]:
    """Lines on what a generic model type did on a tiny copy; ModelError where it would be trained wrongly, or where a
    teacher would not keep documents apart.
    """
    # What is tried of a distillation is the model; its loss is that of targets beside the labels.
    objective = TokenObjective("sft") if isinstance(model.objective, Distillation) else model.objective
    tried = [(model.hf_config, objective)]
    tried += [(model.teacher.hf_config, objective)] if model.teacher is not None else []
    found = [
        check_generic_type(
            hf_config,
            objective=objective,
            attention=config.model.attention,
            packing=config.data.packing,
            row_tokens=config.train.max_seq_len,
            precision=config.train.precision,
        )
        for hf_config, objective in tried
    ]
    return tuple(dict.fromkeys(line for lines in found for line in lines))


def token_limits(config: RunConfig, hf_config: PretrainedConfig) -> TokenLimits:
    """The numbers of the model that rows must respect; ConfigError where `max_seq_len` is more than the model
    allows.
    """
    check_positions(config, hf_config.model_type, max_positions(hf_config))
    return TokenLimits(max_seq_len=config.train.max_seq_len, vocab_size=hf_config.vocab_size)


def model_config(config: RunConfig, *, is_config_alone: bool = False) -> PretrainedConfig:
    """The configuration of the model as it is trained, with the vocabulary that `model.resize_vocabulary` gives it, and
    the positions and rotary scaling of `model.context`.

    With `is_config_alone`, only configuration and tokenizer files of a model on the hub are downloaded.
    """
    hf_config = _published_config(config, is_config_alone=is_config_alone)
    context = _context_plan(config, is_config_alone=is_config_alone)
    if context is not None and context.is_extended:
        for key, value in {**context.settings(), "rope_parameters": dict(context.rope)}.items():
            setattr(hf_config, key, value)
    if config.model.resize_vocabulary:
        grow_vocabulary(hf_config, max(_tokenizer_alone(config).get_vocab().values()) + 1)
    return hf_config


def _published_config(config: RunConfig, *, is_config_alone: bool) -> PretrainedConfig:
    task = task_of(make_objective(config.objective))
    return read_hf_config(config.model.path, **({"files": ("*.json",)} if is_config_alone else {}), task=task)


def _context_plan(config: RunConfig, *, is_config_alone: bool) -> ContextPlan | None:
    """What `model.context` does to the published configuration; None where the run file does not have it."""
    if config.model.context is None:
        return None
    published = _published_config(config, is_config_alone=is_config_alone)
    return plan_context(published.to_dict(), config.model.context)


def _tokenizer_alone(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, for which only its own files are downloaded."""
    return load_tokenizer(str(resolve_folder(config.model.tokenizer or config.model.path, files=TOKENIZER_PATTERNS)))


def config_tree(folder: Path, model: ModelPlan) -> dict[str, Any]:
    """config.json of the model folder as published, but for vocabulary, positions and rotary scaling where the run
    changes them, and for classes, padding token and name of the class where the model is trained as a classifier.
    """
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hf_config, task = model.hf_config, model.task
    if hf_config.vocab_size != read_hf_config(str(folder), task=task).vocab_size:
        tree["vocab_size"] = int(hf_config.vocab_size)
    if model.context is not None and model.context.is_extended:
        tree = extend_tree(tree, model.context)
    if task == "sequence_classification":
        tree["architectures"] = [model_class(hf_config, task).__name__]
        tree |= {key: getattr(hf_config, key) for key in ("id2label", "label2id", "problem_type", "pad_token_id")}
        tree["id2label"] = {str(number): name for number, name in hf_config.id2label.items()}
    return tree


def _shape(folder: Path, model: ModelPlan) -> Shape | None:
    try:
        tree = config_tree(folder, model)
        shape = Shape.of(tree, mtp_layers=len(mtp_layers(model.hf_config)))
    except ConfigError:
        return None
    return shape if model.task == "causal_lm" else shape.with_scores(int(model.hf_config.num_labels))
