"""The samples' prompts with the answers of other samples, from which KTO's z0 is computed."""

from functools import cache

import numpy as np

from ds_finetune.data.documents import Documents, KeptDocument
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest.cells import (
    ROW_LEN,
    SAMPLES,
    log_prob_of_random_weights,
    reference_log_probs,
    row_numbers,
    samples,
)

_MEAN_RATIO = 4.0
"""How much less likely than small random weights the reference finds a mismatched answer, in nats.

A tiny model before training finds them 1 to 2 nats less likely than these, so that its z0 is above 0.
"""


@cache
def mismatched_answers(*, packing: bool) -> MismatchedAnswers:
    """What the program makes of the samples, whose rows are those of `cells.rows`."""
    kept = Documents.of([_kept(ids, labels) for ids, labels in samples()])
    bins = row_numbers(packing)
    rows = PreparedRows(kept, np.concatenate(bins), np.cumsum([0, *map(len, bins)]), kept.counts)
    return MismatchedAnswers(rows, seed=0, max_seq_len=ROW_LEN, is_packed=packing)


def _kept(ids: np.ndarray, labels: np.ndarray) -> KeptDocument:
    return KeptDocument(ids.tolist(), [False, *(labels[:-1] != IGNORE_INDEX).tolist()])


@cache
def mismatched_samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sample, its prompt with the answer of another one, as (ids, shifted labels)."""
    found, answers = [], mismatched_answers(packing=False)
    for number in range(SAMPLES):
        prompt, answer = _parts(number)[0], _parts(answers.partner(number))[1]
        ids = np.concatenate([prompt, answer])
        labels = np.concatenate([ids[1:], [IGNORE_INDEX]]).astype(np.int32)
        labels[: len(prompt) - 1] = IGNORE_INDEX
        found.append((ids, labels))
    return found


def _parts(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and answer of a sample."""
    ids, labels = samples()[number]
    first = 1 + int(np.flatnonzero(labels != IGNORE_INDEX)[0])
    return ids[:first], ids[first:]


@cache
def all_reference_log_probs() -> np.ndarray:
    """Log-probabilities of the samples and then of the mismatched ones under an imagined reference model, fp64."""
    of_random_weights = np.array([log_prob_of_random_weights(labels) for _, labels in mismatched_samples()])
    noise = np.random.default_rng(17).normal(size=SAMPLES)
    return np.concatenate([reference_log_probs(), of_random_weights - _MEAN_RATIO + noise / 10])
