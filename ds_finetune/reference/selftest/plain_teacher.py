"""The teacher of a distillation on the samples: a tiny model of transformers, or its stored distributions."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from ds_finetune.config.objectives import DistillObjective
from ds_finetune.data.scores import DocumentScores, ScoreIdentity, StoredScores, write_manifest, write_shard
from ds_finetune.families.table import FAMILIES
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest.cells import SAMPLES, TINY_MODELS, samples

_TOP_K = 5
_DENSE = next(
    name
    for name, family in FAMILIES.items()
    if family.tiny_models and family.expert_keys is None and "sp" in family.parallel_axes
)
_TEACHER, _SCORES = "teacher", "scores"
SoftTarget = tuple[torch.Tensor, torch.Tensor | None]
"""Log-probabilities of the supervised tokens of a sample, and their ids where only some are stored."""


def with_teacher(section: DistillObjective, model: Path) -> DistillObjective:
    """The section with the teacher, or the scores, that belong to the tiny model in the folder `model`."""
    folder = Path(f"{model}-teacher")
    has_scores = section.scores is not None
    paths = {"scores": str(folder / _SCORES), "teacher": None} if has_scores else {"teacher": str(folder / _TEACHER)}
    return section.model_copy(update=paths)


def write_teacher(model: PretrainedConfig, section: DistillObjective) -> None:
    """Write the teacher that `section` names, or its scores of the samples: a dense model that is sure of itself, with
    the vocabulary and as many heads as `model`.
    """
    heads = model.num_attention_heads
    sizes = {"vocab_size": model.vocab_size, "num_attention_heads": heads, "num_key_value_heads": heads}
    sizes |= {"hidden_size": 12 * heads, "initializer_range": 0.3}
    config = AutoConfig.for_model(**TINY_MODELS[_DENSE] | sizes)
    with torch.random.fork_rng(devices=[]):
        # With a seed of 5 gpt_oss has two experts in its second step that are tied within rounding.
        torch.manual_seed(6)
        lm = AutoModelForCausalLM.from_config(config).float().eval()
    if section.scores is None:
        lm.save_pretrained(Path(str(section.teacher)))
        return
    identity = ScoreIdentity("", "", model.vocab_size, "", "fp32", _TOP_K, SAMPLES)
    write_shard(Path(section.scores), 0, [_scores(log_probs) for log_probs in _log_probs(lm, 1.0)], identity)
    write_manifest(Path(section.scores), identity, 1, {})


def _scores(log_probs: torch.Tensor) -> DocumentScores:
    top, best = log_probs.topk(_TOP_K, dim=-1)
    others = log_probs.scatter(1, best, float("-inf")).logsumexp(-1, keepdim=True)
    return DocumentScores(best.int().numpy(), torch.cat([top, others], dim=-1).half().numpy())


@cache
def soft_targets(section: DistillObjective) -> list[SoftTarget]:
    """What the teacher that `section` names predicts, for each sample."""
    if section.scores is not None:
        stored = StoredScores.open(Path(section.scores))
        return [_stored(stored[number]) for number in range(SAMPLES)]
    lm = AutoModelForCausalLM.from_pretrained(section.teacher, dtype=torch.float32, trust_remote_code=False).eval()
    return [(log_probs, None) for log_probs in _log_probs(lm, section.temperature)]


def _stored(scores: DocumentScores) -> SoftTarget:
    return torch.from_numpy(np.array(scores.log_probs)).float(), torch.from_numpy(np.array(scores.ids)).long()


@torch.no_grad()
def _log_probs(lm: torch.nn.Module, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of the vocabulary for the supervised tokens of each sample, fp32 [tokens, vocabulary]."""
    found = []
    for ids, labels in samples():
        logits = lm(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].float()
        found.append(torch.log_softmax(logits[torch.from_numpy(labels != IGNORE_INDEX)] / temperature, dim=-1))
    return found
