"""A rollout: groups of sampled answers with their rewards and advantages, and the file that a run resumes from where
several steps share one rollout.
"""

import hashlib
import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ds_finetune.checkpoint.commit import complete_steps
from ds_finetune.checkpoint.folder import raise_on_every_rank
from ds_finetune.checkpoint.tools import CHECKPOINTS
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.sampling.answers import Finish, SampledAnswer
from ds_finetune.errors import CheckpointError, OutputError
from ds_finetune.objectives.grpo import advantages, combine_rewards, has_spread
from ds_finetune.system.whole_file import replace_file

FOLDER = "rollouts"
Kind = Literal["rollout", "ahead"]
"""What a file is kept for: a rollout whose first steps are done, or one that was sampled ahead of its steps."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_SCORED = ("parts", "rewards", "advantages", "has_spread")
"""Arrays of an `AnswerGroup`."""
Floats = NDArray[np.float64]
TokenNumbers = Mapping[int, NDArray[np.float32]]
"""A number for each token of an answer, by the number of the answer in its rollout."""


def mean_score(scores: Floats) -> float:
    """The mean of the scores that apply, which is 0 where none does; NaN does not apply."""
    return float(np.nanmean(scores)) if not np.isnan(scores).all() else 0.0


@dataclass(frozen=True)
class RewardRule:
    """How the rewards of an answer become its advantage; keys of the objective, and the weights of the rewards."""

    weights: Floats
    scale: Literal["sum", "each"]
    """How rewards are combined that advantages compare; with `each` they add up to 0 in a group."""
    advantage: Literal["mean", "mean_std", "leave_one_out"]


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
        cls, prompt: tuple[int, int], answers: Sequence[SampledAnswer], parts: Floats, rule: RewardRule
    ) -> "AnswerGroup":
        """The group of a prompt, which is its draw and its number, with what follows from the scores of its answers."""
        compared, total = (combine_rewards(parts, rule.weights, how) for how in (rule.scale, "sum"))
        found = advantages(compared[None], rule.advantage)[0]
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

    def content(self) -> bytes:
        """It as the bytes of an .npz file."""
        answers = [answer for group in self.groups for answer in group.answers]
        arrays: dict[str, NDArray[Any]] = {
            "head": np.array([self.first, self.until, self.steps, self.sampled_at], dtype=np.int64),
            "noted": np.array(list(self.noted)),
            "values": np.array(list(self.noted.values()), dtype=np.float64),
            "trained": np.array(self.trained, dtype=np.int64),
            "prompts": np.array([(group.draw, group.number) for group in self.groups], dtype=np.int64).reshape(-1, 2),
            **{name: np.stack([getattr(group, name) for group in self.groups]) for name in _SCORED},
            "lengths": np.array([len(answer.ids) for answer in answers], dtype=np.int64),
            "ids": np.concatenate([answer.ids for answer in answers]),
            "sampled": np.concatenate([answer.log_probs for answer in answers]),
            "cut": np.array([answer.finish == "length" for answer in answers]),
        }
        marks = [answer.experts for answer in answers if answer.experts is not None]
        arrays |= {"experts": np.concatenate(marks)} if marks else {}
        for name, numbers in (("old", self.old), ("reference", self.reference)):
            arrays |= {f"{name}_of": np.array(sorted(numbers), dtype=np.int64)}
            arrays |= {name: np.concatenate([np.zeros(0, np.float32), *(numbers[of] for of in sorted(numbers))])}
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def read(cls, content: bytes) -> "Rollout":
        """The rollout of `content`, as it was scored, whatever the rewards of the run file are now."""
        with np.load(io.BytesIO(content)) as file:
            found = dict(file)
        ends = np.cumsum(found["lengths"])[:-1]
        ids, log_probs = np.split(found["ids"], ends), np.split(found["sampled"], ends)
        experts = np.split(found["experts"], ends) if "experts" in found else [None] * len(ids)
        finish: list[Finish] = ["length" if is_cut else "stop" for is_cut in found["cut"]]
        answers = [SampledAnswer(*each) for each in zip(ids, log_probs, finish, experts, strict=True)]
        size = found["parts"].shape[1]
        groups = tuple(
            AnswerGroup(
                draw, number, tuple(answers[place * size :][:size]), **{name: found[name][place] for name in _SCORED}
            )
            for place, (draw, number) in enumerate(found["prompts"].tolist())
        )
        first, until, steps, sampled_at = found["head"].tolist()
        old, reference = (
            _by_answer(found[f"{name}_of"], found[name], found["lengths"]) for name in ("old", "reference")
        )
        trained = tuple(found["trained"].tolist())
        noted = dict(zip(found["noted"].tolist(), found["values"].tolist(), strict=True))
        return cls(first, groups, trained, until, steps, sampled_at, noted, old=old, reference=reference)


def _by_answer(of: NDArray[np.int64], flat: NDArray[np.float32], lengths: NDArray[np.int64]) -> TokenNumbers:
    if not len(of):
        return {}
    return dict(zip(of.tolist(), np.split(flat, np.cumsum(lengths[of])[:-1]), strict=True))


class RolloutFiles:
    """The files of rollouts in a run folder, by their first steps; rank zero writes and reads them.

    At most `steps` steps share a rollout.
    """

    def __init__(self, output_dir: Path, *, steps: int, is_rank_zero: bool) -> None:
        self._folder, self._checkpoints = output_dir / FOLDER, output_dir / CHECKPOINTS
        self._steps, self._is_rank_zero = steps, is_rank_zero
        self.of_save: Collection[tuple[Kind, int]] = ()
        """Kinds and first steps of those that the latest save needs; it may last longer than a few rollouts."""

    def write(self, rollout: Rollout, kind: Kind = "rollout") -> str:
        """Write a rollout, on the disk before this returns, and remove those that no checkpoint needs; returns the
        hash of the file. Collective: OutputError on every rank where it cannot be written.
        """
        path = self._path(rollout.first, kind)
        error, digest = None, ""
        if self._is_rank_zero:
            content = rollout.content()
            digest = hashlib.sha256(content).hexdigest()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(path, content, is_synced=True)
                self._remove_unneeded(rollout.first, written=path)
            except OSError as refused:
                error = OutputError(
                    f"`{path}` cannot be written: {refused.strerror}",
                    hint="make room; the same command resumes from the last checkpoint",
                )
        raise_on_every_rank(error)
        return all_gather_object(digest)[0]

    def read(self, first: int, digest: str, kind: Kind = "rollout") -> Rollout:
        """The rollout of that first step; CheckpointError on every rank where it is not what the checkpoint names."""
        path, content, error = self._path(first, kind), b"", None
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
        return Rollout.read(all_gather_object(content)[0])

    def _path(self, first: int, kind: Kind) -> Path:
        return self._folder / f"{kind}-{first:06d}.npz"

    def _remove_unneeded(self, newest: int, *, written: Path) -> None:
        """Remove the files that no checkpoint needs; files later than the newest one are of steps that are done
        again.
        """
        saved = complete_steps(self._checkpoints) if self._checkpoints.is_dir() else []
        paths = {
            (kind, int(path.stem.rpartition("-")[2])): path
            for kind in KINDS
            for path in self._folder.glob(f"{kind}-*.npz")
        }
        recent = sorted(first for kind, first in paths if kind == "rollout" and first <= newest)[-2:]
        kept = {
            written,
            *(self._path(first, kind) for kind, first in [*self.of_save, *(("rollout", at) for at in recent)]),
        }
        for (kind, first), path in paths.items():
            # Steps whose checkpoints need it: those in its middle, or of the rollout before it, which it was ahead of.
            steps = range(first + 1, first + self._steps)
            if kind == "ahead":
                steps = range(first - self._steps + 1, first + 1)
            if path not in kept and not any(step in steps for step in saved):
                path.unlink(missing_ok=True)
