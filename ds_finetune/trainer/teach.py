"""Writes a teacher's distributions for the supervised tokens of a run's training rows."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ds_finetune.config.objectives import DistillObjective
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.console.phase_line import PhaseLine, Say
from ds_finetune.data.prepared_rows import PreparedRows, Row
from ds_finetune.data.teacher_scores import (
    DocumentScores,
    ScoreIdentity,
    documents_hash,
    is_shard_complete,
    shard_name,
    tokens_hash,
    write_manifest,
    write_shard,
)
from ds_finetune.engine.devices import bf16_support, choose_device, device_of_rank
from ds_finetune.errors import ConfigError
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.model.loss.forward_rows import find_supervised
from ds_finetune.model.loss.soft_targets import top_log_probs
from ds_finetune.model.loss.teacher import Teacher, load_teacher
from ds_finetune.model.weights.load import weights_digest
from ds_finetune.plan.model_checks import check_model
from ds_finetune.plan.precision import with_precision
from ds_finetune.plan.settings import ModelSettings, RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.inputs import RunInputs, read_inputs
from ds_finetune.trainer.resolve import model_config, plan_model, token_limits, try_generic_type

SHARD_DOCUMENTS = 256
"""Number of documents in a shard of teacher scores; a shard is written at once."""


@dataclass(frozen=True)
class Lesson:
    """Documents that a teacher scores, and the `identity` by which its stored scores are recognised."""

    run: RunSettings
    rows: PreparedRows
    identity: ScoreIdentity
    folder: Path

    @property
    def num_shards(self) -> int:
        """Number of shards in the finished folder of scores."""
        return -(-self.rows.counts.documents // self.identity.shard_documents)

    def documents_of(self, shard: int) -> range:
        """Indices of the documents of a shard."""
        size = self.identity.shard_documents
        return range(shard * size, min((shard + 1) * size, self.rows.counts.documents))


def teach(run: RunSettings, teacher: str, out: Path, *, top_k: int, say: Say) -> None:
    """Write the `top_k` log-probabilities of `teacher` for the training rows of `run` to the folder `out`. Under a
    launcher each rank has the full teacher and writes some of the shards. The last rank to finish marks the folder as
    complete. Existing shards are kept, so that a call continues an earlier one that was killed. ModelError if the
    vocabularies differ; OutputError if `out` has scores of other rows or of another teacher.
    """
    if run.data.streaming:
        raise ConfigError(
            f"data.streaming is {run.data.streaming}, but scores are stored by row number, which streamed rows lack",
            hint="set data.streaming: false",
        )
    world, device = World.from_environment(os.environ), choose_device()
    train, notes = with_precision(run.train, device=device, support=bf16_support(device, world))
    for note in notes if world.rank == 0 else ():
        say(note)
    objective, data = DistillObjective(name="distill", teacher=teacher), run.data.model_copy(update={"eval": ()})
    sections = replace(run, train=train, objective=objective, data=data)
    run = replace(sections, lora=None, router=None, parallel=ParallelConfig())
    model = plan_model(model_config(run), run)
    assert model.teacher is not None
    check_model(ModelSettings(run, model.teacher.hf_config.to_dict()), "teacher")
    try_generic_type(run, model)
    token_limits(run, model.hf_config)
    lesson = _plan_lesson(run, model, read_inputs(run, model), out, top_k=top_k)
    rank_shards = range(world.rank, lesson.num_shards, world.world_size)
    missing = [number for number in rank_shards if not is_shard_complete(out, number, lesson.identity)]
    if missing:
        _write_shards(lesson, model, missing, world)
    # A shard's folder gets its final name when it is complete; the rank that writes it has verified it.
    complete = sum((out / shard_name(number)).is_dir() for number in range(lesson.num_shards))
    if complete == lesson.num_shards:
        counts = lesson.rows.counts
        remarks = {"teacher": teacher, "documents": counts.documents, "supervised_tokens": counts.supervised}
        write_manifest(out, lesson.identity, lesson.num_shards, remarks)
        say(f"{out} has the {top_k} most likely tokens after each of {counts.supervised:,} supervised tokens")
    else:
        say(f"{out}: {complete} of {lesson.num_shards} shards are written; the last rank to finish completes it")


def _plan_lesson(run: RunSettings, model: ModelPlan, inputs: RunInputs, out: Path, *, top_k: int) -> Lesson:
    assert isinstance(inputs.train, PreparedRows)
    assert model.teacher is not None
    vocabulary = int(model.hf_config.vocab_size)
    common = min(vocabulary, int(model.teacher.hf_config.vocab_size))
    if top_k >= common:
        raise ConfigError(
            f"--top-k {top_k} is not less than the {common} tokens of the vocabulary",
            hint=f"set --top-k to {common - 1} or less",
        )
    identity = ScoreIdentity(
        documents=documents_hash(inputs.train.documents),
        tokenizer=tokens_hash(inputs.tokenizer.get_vocab()),
        vocabulary=vocabulary,
        teacher=weights_digest(resolve_folder(model.teacher.path)),
        precision=run.precision,
        top_k=top_k,
        shard_documents=SHARD_DOCUMENTS,
    )
    number = inputs.train.counts.documents
    one_by_one = replace(inputs.train, order=np.arange(number), offsets=np.arange(number + 1))
    return Lesson(run, one_by_one, identity, out)


def _write_shards(lesson: Lesson, model: ModelPlan, shards: Sequence[int], world: World) -> None:
    assert model.teacher is not None
    device = device_of_rank(choose_device(), world.local_rank)
    teacher = load_teacher(model.teacher, model.attention, lesson.run.train.precision, device).unsharded_teacher()
    documents = sum(len(lesson.documents_of(shard)) for shard in shards)
    with PhaseLine("scoring documents", documents, is_rank_zero=world.rank == 0) as line:
        for shard in shards:
            scores: list[DocumentScores] = []
            for rows in _forwards(lesson, lesson.documents_of(shard)):
                scores += _scores(teacher, rows, lesson.identity, torch.device(device))
                line.advance(len(rows))
            write_shard(lesson.folder, shard, scores, lesson.identity)


def _forwards(lesson: Lesson, documents: range) -> Iterator[list[Row]]:
    limit, rows, tokens = lesson.run.train.max_seq_len, list[Row](), 0
    for number in documents:
        row = lesson.rows[number]
        if rows and (not lesson.run.data.packing or tokens + len(row.input_ids) > limit):
            yield rows
            rows, tokens = [], 0
        rows.append(row)
        tokens += len(row.input_ids)
    yield rows


def _scores(
    teacher: Teacher, rows: Sequence[Row], identity: ScoreIdentity, device: torch.device
) -> list[DocumentScores]:
    top_k, vocabulary = identity.top_k, identity.vocabulary
    ids, positions, labels = (
        torch.from_numpy(np.concatenate([getattr(row, name) for row in rows])).long().to(device)
        for name in ("input_ids", "position_ids", "labels")
    )
    lengths = (tuple(len(row.input_ids) for row in rows),)
    hidden = teacher.hidden(ids[None], positions[None], lengths, find_supervised(labels))
    with teacher.targets(hidden, 1.0) as states:
        bias = states.bias if states.bias is None else states.bias[:vocabulary]
        best, log_probs = top_log_probs(states.hidden, states.weight[:vocabulary], bias, top_k, cap=states.cap)
    ends = np.cumsum([row.supervised for row in rows])[:-1]
    parts = zip(np.split(best.cpu().numpy(), ends), np.split(log_probs.cpu().numpy(), ends), strict=True)
    return [DocumentScores(*part) for part in parts]
