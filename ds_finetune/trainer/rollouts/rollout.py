"""A rollout: groups of sampled answers with their rewards and advantages, and the file that a run resumes from where
several steps share one rollout.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.checkpoint.commit import complete_steps, step_name
from ds_finetune.checkpoint.folder import raise_on_every_rank
from ds_finetune.checkpoint.tools import CHECKPOINTS
from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.sampling.answers import SampledAnswer
from ds_finetune.errors import CheckpointError, OutputError
from ds_finetune.objectives.grpo import advantages, combine_rewards, has_spread
from ds_finetune.system.whole_file import replace_file

FOLDER = "rollouts"
_NUMPY: list[Any] = [
    *(np.ndarray, np.dtype, np.empty(0).__reduce__()[0]),
    *(type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i2")),
]
"""What the arrays in a file of a rollout are made of."""
Floats = NDArray[np.float64]
TokenNumbers = Mapping[int, NDArray[np.float32]]
"""A number for each token of an answer, by the number of the answer in its rollout."""


def mean_score(scores: Floats) -> float:
    """The mean of the scores that apply, which is 0 where none does; NaN does not apply."""
    return float(np.nanmean(scores)) if not np.isnan(scores).all() else 0.0


@dataclass(frozen=True)
class AnswerGroup:
    """A prompt, the answers that were sampled to it, and how they were scored."""

    draw: int
    """Number of the prompt in the order of the run, which continues from epoch to epoch."""
    number: int
    """Number of the prompt in the data."""
    answers: tuple[SampledAnswer, ...]
    parts: Floats
    """Scores by each reward, fp64 [answers, rewards]; NaN where one does not apply."""
    rewards: Floats
    """Weighed and added up, fp64 [answers]."""
    advantages: Floats
    has_spread: bool
    """Whether the rewards that the advantages compare are different."""

    @classmethod
    def scored(
        cls,
        prompt: tuple[int, int],
        answers: Sequence[SampledAnswer],
        parts: Floats,
        weights: Floats,
        section: GrpoObjective,
    ) -> "AnswerGroup":
        """The group of a prompt, which is its draw and its number, with what follows from the scores of its answers and
        the weights of the rewards.
        """
        compared, total = (combine_rewards(parts, weights, how) for how in (section.reward_scale, "sum"))
        found = advantages(compared[None], section.advantage)[0]
        return cls(*prompt, tuple(answers), parts, total, found, bool(has_spread(compared[None])[0]))

    @property
    def verdicts(self) -> Floats:
        """For each answer its score by the first reward of the run file that applies to it, fp64 [answers]: 1 or more
        is right, 0 or less is wrong.
        """
        first = np.argmax(~np.isnan(self.parts), axis=1)
        return self.parts[np.arange(len(self.parts)), first]

    @property
    def is_all_right(self) -> bool:
        """Whether every answer is right."""
        return bool((self.verdicts >= 1).all())

    @property
    def is_all_wrong(self) -> bool:
        """Whether no answer has any part of the reward."""
        return bool((self.verdicts <= 0).all())


@dataclass(frozen=True)
class Rollout:
    """The groups that one step or more are trained on, in the order in which they were drawn."""

    first: int
    """Steps that were done before it."""
    groups: tuple[AnswerGroup, ...]
    trained: tuple[int, ...]
    """Indices of the groups whose answers are trained."""
    until: int
    """The draw after the last prompt of the rollout."""
    steps: int
    """Optimizer steps that share it."""
    sampled_at: int = 0
    """Steps that were done when it was sampled."""
    noted: Mapping[str, float] = field(default_factory=dict)
    """What `SampledGroups` noted, and the seconds of `log_probs`."""
    old: TokenNumbers = field(default_factory=dict)
    """Log-probabilities before the first of its steps, of answers of later steps."""
    reference: TokenNumbers = field(default_factory=dict)
    """Log-probabilities under the reference model."""

    def groups_of_step(self, place: int) -> Sequence[int]:
        """Indices of the groups of one of its steps: whole groups, as evenly divided as possible."""
        number = len(self.trained)
        return self.trained[place * number // self.steps : (place + 1) * number // self.steps]


Rollouts = tuple[Rollout | None, Rollout | None]
"""The rollout that a run is in the middle of, as it was scored, and the one that is sampled ahead of the steps after
it.
"""


class RolloutFiles:
    """The files in a run folder of the rollouts that checkpoints need; rank zero writes and reads them."""

    def __init__(self, output_dir: Path, *, is_rank_zero: bool) -> None:
        self._folder, self._checkpoints = output_dir / FOLDER, output_dir / CHECKPOINTS
        self._is_rank_zero = is_rank_zero

    def write(self, step: int, rollouts: Rollouts) -> str:
        """Write what the checkpoint of `step` needs, on the disk before this returns, and remove files that no other
        checkpoint needs; returns the hash of the file. Collective: OutputError on every rank where it cannot be
        written.
        """
        path, error, digest = self._path(step), None, ""
        if self._is_rank_zero:
            file = io.BytesIO()
            torch.save(rollouts, file)
            digest = hashlib.sha256(file.getvalue()).hexdigest()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(path, file.getvalue(), is_synced=True)
                saved = complete_steps(self._checkpoints) if self._checkpoints.is_dir() else []
                for old in {*self._folder.glob("step-*.pt")} - {path, *map(self._path, saved)}:
                    old.unlink(missing_ok=True)
            except OSError as refused:
                error = OutputError(
                    f"`{path}` cannot be written: {refused.strerror}",
                    hint="make room; the same command resumes from the last checkpoint",
                )
        raise_on_every_rank(error)
        return all_gather_object(digest)[0]

    def read(self, step: int, digest: str) -> Rollouts:
        """What the checkpoint of `step` needs; CheckpointError on every rank where it is not what that names."""
        path, content, error = self._path(step), b"", None
        if self._is_rank_zero:
            with suppress(OSError):
                content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                what = "is damaged" if content else "is missing"
                error = CheckpointError(
                    f"`{path}` {what}; the checkpoint needs this rollout, whose steps are not done",
                    hint="put the file back, or resume from another checkpoint",
                )
        raise_on_every_rank(error)
        # No other code than that of these classes is run.
        with torch.serialization.safe_globals([Rollout, AnswerGroup, SampledAnswer, *_NUMPY]):
            rollouts: Rollouts = torch.load(io.BytesIO(all_gather_object(content)[0]), weights_only=True)
        return rollouts

    def _path(self, step: int) -> Path:
        return self._folder / f"{step_name(step)}.pt"
