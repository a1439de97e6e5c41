"""Rollouts: groups of sampled answers with rewards and advantages, and the files that save unfinished rollouts.

From such a file, a run resumes in the middle of a rollout of several steps.
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
"""Types within the arrays of a rollout file, which `torch.load` must be allowed to unpickle."""
Floats = NDArray[np.float64]
TokenNumbers = Mapping[int, NDArray[np.float32]]
"""A value for each token of an answer, by the number of the answer in its rollout."""


def mean_score(scores: Floats) -> float:
    """The mean of the scores that are not NaN; 0 if all are NaN."""
    return float(np.nanmean(scores)) if not np.isnan(scores).all() else 0.0


@dataclass(frozen=True)
class AnswerGroup:
    """A prompt with its sampled answers, and their scores."""

    draw: int
    """Position of the prompt in the order in which the run samples prompts, counted over all epochs."""
    number: int
    """Number of the prompt in the data."""
    answers: tuple[SampledAnswer, ...]
    parts: Floats
    """Scores of each reward, fp64 [answers, rewards]; NaN if a reward does not apply."""
    rewards: Floats
    """Reward of each answer, the weighted sum of its scores, fp64 [answers]."""
    advantages: Floats
    has_spread: bool
    """Whether the answers differ in the rewards that give their advantages."""

    @classmethod
    def scored(
        cls,
        prompt: tuple[int, int],
        answers: Sequence[SampledAnswer],
        parts: Floats,
        weights: Floats,
        section: GrpoObjective,
    ) -> "AnswerGroup":
        """Make the group of `prompt` (its `draw` and `number`) from the scores `parts` and the rewards' `weights`."""
        compared, total = (combine_rewards(parts, weights, how) for how in (section.reward_scale, "sum"))
        of_answers = advantages(compared[None], section.advantage)[0]
        return cls(*prompt, tuple(answers), parts, total, of_answers, bool(has_spread(compared[None])[0]))

    @property
    def verdicts(self) -> Floats:
        """Each answer's score, fp64 [answers], by the first reward that applies to the answer. A score of at least 1 is
        right, of at most 0 wrong.
        """
        first = np.argmax(~np.isnan(self.parts), axis=1)
        return self.parts[np.arange(len(self.parts)), first]

    @property
    def is_all_right(self) -> bool:
        """Whether every answer of the group is right, with a score of 1 or more."""
        return bool((self.verdicts >= 1).all())

    @property
    def is_all_wrong(self) -> bool:
        """Whether every answer of the group is wrong, with a score of 0 or less."""
        return bool((self.verdicts <= 0).all())


@dataclass(frozen=True)
class Rollout:
    """Groups of answers for one or more optimizer steps, in the order of `AnswerGroup.draw`."""

    first: int
    """Number of optimizer steps completed before this rollout's first step."""
    groups: tuple[AnswerGroup, ...]
    trained: tuple[int, ...]
    """Indices of the groups whose answers are trained on."""
    until: int
    """Position, in the run's order of prompts, that follows the rollout's last prompt."""
    steps: int
    """Number of optimizer steps that train on the rollout's answers."""
    sampled_at: int = 0
    """Number of optimizer steps completed when the rollout was sampled."""
    noted: Mapping[str, float] = field(default_factory=dict)
    """Measurements by name, such as the seconds for sampling, rewards and log-probabilities of the rollout."""
    old: TokenNumbers = field(default_factory=dict)
    """Log-probabilities, before the rollout's first step, of the answers that its later steps train on."""
    reference: TokenNumbers = field(default_factory=dict)
    """Log-probabilities of the answers under the reference model."""

    def groups_of_step(self, step: int) -> Sequence[int]:
        """Indices of the groups for step number `step` of the rollout. Steps have about equally many groups."""
        number = len(self.trained)
        return self.trained[step * number // self.steps : (step + 1) * number // self.steps]


Rollouts = tuple[Rollout | None, Rollout | None]
"""The scored rollout that is being trained on, and the rollout that was sampled ahead for the following steps."""


class RolloutFiles:
    """The rollout files in a run folder, which checkpoints need. Rank zero writes and reads them."""

    def __init__(self, output_dir: Path, *, is_rank_zero: bool) -> None:
        self._folder, self._checkpoints = output_dir / FOLDER, output_dir / CHECKPOINTS
        self._is_rank_zero = is_rank_zero

    def write(self, step: int, rollouts: Rollouts) -> str:
        """Write the rollouts that the checkpoint of `step` needs, flush them to the disk, and return the file's hash;
        collective. Files that no checkpoint needs are removed. OutputError on every rank if the file cannot be written.
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
                    hint="free some space, then start the same command again: it resumes from the last checkpoint",
                )
        raise_on_every_rank(error)
        return all_gather_object(digest)[0]

    def read(self, step: int, digest: str) -> Rollouts:
        """Read the rollouts for the checkpoint of `step`. CheckpointError if their hash is not `digest`."""
        path, content, error = self._path(step), b"", None
        if self._is_rank_zero:
            with suppress(OSError):
                content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                fault = "damaged" if content else "missing"
                error = CheckpointError(
                    f"`{path}` is {fault}, and the checkpoint needs it, since it was saved in the middle of a rollout",
                    hint="restore the file, or resume from another checkpoint",
                )
        raise_on_every_rank(error)
        # Only the classes of rollouts may be unpickled, so that the file cannot run code.
        with torch.serialization.safe_globals([Rollout, AnswerGroup, SampledAnswer, *_NUMPY]):
            rollouts: Rollouts = torch.load(io.BytesIO(all_gather_object(content)[0]), weights_only=True)
        return rollouts

    def _path(self, step: int) -> Path:
        return self._folder / f"{step_name(step)}.pt"
