"""What a distillation reads beside a run's model and rows: the teacher's tokenizer, or its stored scores."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import ObjectiveConfig, is_distillation
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.scores import StoredScores
from ds_finetune.data.stream import StreamedRows
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, resolve_folder
from ds_finetune.model.loss.teacher import check_same_tokens
from ds_finetune.model.weights.load import weights_digest


def with_local_teacher(objective: ObjectiveConfig, model: ModelPlan) -> ObjectiveConfig:
    """The objective with the folder on this machine of a live teacher, which the run file may name by a hub id:
    estimates read its config.json.
    """
    if model.teacher is None:
        return objective
    folder = str(resolve_folder(model.teacher.path, files=TOKENIZER_PATTERNS))
    return objective.model_copy(update={"teacher": folder})


def check_teacher_tokens(model: ModelPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """ModelError where ids mean other tokens in the tokenizer of a live teacher; DataError where it has none."""
    if model.teacher is not None:
        folder = resolve_folder(model.teacher.path, files=TOKENIZER_PATTERNS)
        theirs = load_tokenizer(str(folder))
        check_same_tokens(model.teacher.path, theirs.get_vocab(), tokenizer.get_vocab())


def open_scores(
    section: ObjectiveConfig, model: ModelPlan, tokenizer: PreTrainedTokenizerBase, rows: PreparedRows | StreamedRows
) -> StoredScores | None:
    """The stored scores that the objective names; DataError where they are damaged or do not belong to `rows`."""
    if not is_distillation(section) or section.scores is None:
        return None
    assert isinstance(rows, PreparedRows)
    scores = StoredScores.open(Path(section.scores))
    scores.check(rows.documents, tokenizer.get_vocab(), int(model.hf_config.vocab_size))
    return scores


def teacher_digest(model: ModelPlan, scores: StoredScores | None) -> str:
    """A digest of the teacher's weights, by which a resumed run knows it; empty where there is no teacher."""
    if scores is not None:
        return scores.identity.teacher
    return weights_digest(resolve_folder(model.teacher.path)) if model.teacher is not None else ""
