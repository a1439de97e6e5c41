"""Scores of documents from the forwards of an evaluation, for metrics that need those of all ranks together."""

import numpy as np
from numpy.typing import NDArray

from ds_finetune.data.batches import MicroBatch
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.model.loss.forward_rows import StageOutput
from ds_finetune.objectives.objective import LossAndSums
from ds_finetune.plan.mesh import Mesh

DocumentScores = NDArray[np.float64]
"""First score and target of documents, fp64 [documents, 2]."""
NO_SCORES: DocumentScores = np.zeros((0, 2))


def scores_of(out: LossAndSums | StageOutput, micro: MicroBatch) -> DocumentScores:
    """The scores of a forward; none of a pipeline stage before the last."""
    if not isinstance(out, LossAndSums) or out.scores is None:
        return NO_SCORES
    assert micro.examples is not None
    return np.stack([out.scores[:, 0].double().cpu().numpy(), micro.examples.targets.cpu().numpy()], axis=1)


def gather_scores(parts: list[DocumentScores], mesh: Mesh) -> DocumentScores:
    """The scores of all ranks, on every rank; of ranks that process the same rows the first one counts."""
    is_first = mesh.place("tp") == mesh.place("sp") == 0
    mine = np.concatenate([NO_SCORES, *parts]) if is_first else NO_SCORES
    return np.concatenate(all_gather_object(mine))
