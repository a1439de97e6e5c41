"""Parts of rollouts: their files, which ids may be drawn, and pass@k."""

import hashlib
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_finetune.checkpoint.commit import step_name
from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.config.sections import RolloutConfig
from ds_finetune.engine.sampling.answers import SampledAnswer, SamplingRequest
from ds_finetune.objectives.grpo import pass_at, pass_shares
from ds_finetune.objectives.rewards.pool import open_rewards
from ds_finetune.plan.mesh import Mesh
from ds_finetune.trainer.rollouts.observer import RewardEvaluation, held_out_scores
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, Rollout, RolloutFiles
from ds_finetune.trainer.rollouts.sampling import AnswerTexts, Sampler, allowed_ids
from tests.objectives.rewards.scoring import section_of

WEIGHTS, SECTION = np.array([1.0, 0.5]), GrpoObjective(name="grpo")
NAN = float("nan")


def group(draw: int, parts: list[list[float]]) -> AnswerGroup:
    """Answers of 1, 2, ... tokens to one prompt, of which the last one is cut."""
    answers = [
        SampledAnswer(
            np.arange(length, dtype=np.int64) + draw,
            np.linspace(-1, 0, length, dtype=np.float32),
            "length" if length == len(parts) else "stop",
            np.arange(2 * length, dtype=np.int16).reshape(length, 2),
        )
        for length in range(1, len(parts) + 1)
    ]
    return AnswerGroup.scored((draw, draw % 3), answers, np.array(parts), WEIGHTS, SECTION)


def test_rewards_of_a_group_are_weighed_and_compared() -> None:
    found = group(4, [[1, 0], [0, 1], [NAN, NAN]])
    assert found.rewards.tolist()[:2] == [1.0, 0.5]
    assert found.advantages.tolist() == [0.25, -0.25, 0]
    assert found.has_spread
    assert found.verdicts.tolist()[:2] == [1, 0]
    assert not found.is_all_right
    assert not found.is_all_wrong
    assert group(0, [[1, 0], [NAN, 1]]).is_all_right
    assert group(0, [[0, 1], [-1, 1]]).is_all_wrong


def test_rewards_that_are_scaled_one_by_one_are_reported_as_sums() -> None:
    """A greedy answer is a group of one, which scaling would make 0 whatever its score."""
    rule = (WEIGHTS, GrpoObjective(name="grpo", reward_scale="each"))
    (answer, other) = group(0, [[1, 0], [0, 1]]).answers
    assert AnswerGroup.scored((0, 0), [answer], np.array([[1.0, 1.0]]), *rule).rewards.tolist() == [1.5]
    both = AnswerGroup.scored((0, 0), [answer, other], np.array([[1.0, 1.0], [0.0, 1.0]]), *rule)
    assert both.rewards.tolist() == [1.5, 0.5]
    assert both.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert both.has_spread


def files_of_one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutFiles:
    """The files of a run of one rank, which has no process group here."""
    monkeypatch.setattr("ds_finetune.trainer.rollouts.rollout.all_gather_object", lambda mine: [mine])
    monkeypatch.setattr("ds_finetune.trainer.rollouts.rollout.raise_on_every_rank", lambda error: None)
    return RolloutFiles(folder, is_rank_zero=True)


def test_a_rollout_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of_one_rank(tmp_path, monkeypatch)
    groups = (group(4, [[1, 0], [0, NAN]]), group(5, [[0.1, 0], [0.1, 0]]))
    numbers = {1: np.array([-0.5, -0.25], np.float32), 2: np.array([-0.125], np.float32)}
    noted = Counter({"sample": 0.5, "unparsed": 2.0})
    rollout = Rollout(6, groups, (0,), 7, 3, 5, noted, old=numbers, reference={})
    again, ahead = files.read(7, files.write(7, (rollout, replace(rollout, first=9))))
    assert again is not None
    assert ahead is not None
    assert (ahead.first, ahead.old.keys()) == (9, {1, 2})
    assert (again.first, again.trained, again.until, again.steps, again.sampled_at) == (6, (0,), 7, 3, 5)
    assert again.noted == {"sample": 0.5, "unparsed": 2.0}
    for mine, theirs in zip(groups, again.groups, strict=True):
        assert (mine.draw, mine.number, mine.has_spread) == (theirs.draw, theirs.number, theirs.has_spread)
        for name in ("parts", "rewards", "advantages"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name), equal_nan=True)
        for answer, read in zip(mine.answers, theirs.answers, strict=True):
            assert (answer.finish, answer.log_probs.dtype) == (read.finish, read.log_probs.dtype)
            assert all(map(np.array_equal, (answer.ids, answer.experts), (read.ids, read.experts)))
    assert {number: part.tolist() for number, part in again.old.items()} == {1: [-0.5, -0.25], 2: [-0.125]}


def test_a_file_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = files_of_one_rank(tmp_path, monkeypatch), tmp_path / "rollouts" / "step-000007.pt"
    path.parent.mkdir()
    torch.save(partial(print, "code"), path)
    with pytest.raises(UnpicklingError):
        files.read(7, hashlib.sha256(path.read_bytes()).hexdigest())


def test_whole_groups_are_divided_over_the_steps_of_a_rollout() -> None:
    groups = tuple(group(draw, [[1, 0], [0, 0]]) for draw in range(7))
    rollout = Rollout(0, groups, (0, 1, 3, 4, 6), 7, 3)
    steps = [list(rollout.groups_of_step(place)) for place in range(3)]
    assert steps == [[0], [1, 3], [4, 6]]


def test_files_that_no_checkpoint_needs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, saved = files_of_one_rank(tmp_path, monkeypatch), [1, 4]
    monkeypatch.setattr("ds_finetune.trainer.rollouts.rollout.complete_steps", lambda folder: saved)
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2, 4, 7):
        files.write(step, (Rollout(0, (group(0, [[1, 0], [0, 0]]),), (0,), 1, 9), None))
    # Step 2 was not saved, and 7 is about to be.
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [f"{step_name(n)}.pt" for n in (1, 4, 7)]


def test_a_file_that_cannot_be_read_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    files = files_of_one_rank(tmp_path, monkeypatch)
    monkeypatch.setattr("ds_finetune.trainer.rollouts.rollout.raise_on_every_rank", errors.append)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000003.pt").symlink_to("/proc/self/mem")
    with pytest.raises(EOFError):
        files.read(3, "abc")
    assert "step-000003.pt` is missing, and the checkpoint needs it" in errors[0].message


class _Rows:
    """Two prompts with the answers "3" and "4"."""

    def prompt_ids(self, number: int) -> list[int]:
        return [number]

    def record(self, number: int) -> dict[str, Any]:
        return {"answer": str(3 + number), "file": str(self.seen)}

    def where(self, number: int) -> str:
        return f"line {number}"

    def __init__(self, seen: Path) -> None:
        self.seen = seen


def _start(request: SamplingRequest, seen: Path) -> Any:
    """Answers with the digits 3, 4 and 5 to each prompt, of which `seen` is written while they are sampled."""
    answers = [SampledAnswer(np.array([digit, 9]), np.zeros(2, np.float32), "stop") for digit in (3, 4, 5)]
    for place in range(6):
        request.on_answer(place, answers[place % 3])
    deadline = time.monotonic() + 240
    while not seen.exists():
        assert time.monotonic() < deadline, "no reward ran while answers were sampled"
        time.sleep(0.01)
    return lambda: [answers for _ in request.prompts]


def _texts() -> AnswerTexts:
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(str, ids)), get_vocab=lambda: {"a": 0})
    return AnswerTexts(tokenizer, (9,), 10, RolloutConfig())  # type: ignore[arg-type]


def _run_of() -> Any:
    return SimpleNamespace(
        plan=SimpleNamespace(mesh=Mesh(0, 1), dp=1, train=SimpleNamespace(seed=3)),
        config=SimpleNamespace(rollout=RolloutConfig(), objective=SECTION),
    )


def test_rewards_run_while_other_answers_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_finetune.trainer.rollouts.sampling.all_gather_object", lambda mine: [mine])
    seen, sections = tmp_path / "seen", ["exact_match", ":counts_calls"]
    with open_rewards([section_of(each) for each in sections], workers=1) as rewards:
        sampler = Sampler(_run_of(), partial(_start, seen=seen), rewards, SimpleNamespace(restart_limit=None), _texts())  # type: ignore[arg-type]
        sampled = sampler.sample(_Rows(seen), [(7, 0), (8, 1)], 3)  # type: ignore[arg-type]
        found = sampled.groups()
    assert found is not None
    assert [each.parts[:, 0].tolist() for each in found] == [[1, 0, 0], [0, 1, 0]]
    assert sorted(np.concatenate([each.parts[:, 1] for each in found])) == [1, 2, 3, 4, 5, 6]
    assert [(each.draw, each.number) for each in found] == [(7, 0), (8, 1)]
    assert sampled.noted["unparsed"] == 0


def test_ranks_meet_while_rewards_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog and torch take a rank that waits for others for hung, where they meet too rarely."""
    meetings, seen = list[object](), tmp_path / "seen"

    def meet(mine: object) -> list[object]:
        meetings.append(mine)
        if len(meetings) == 3:
            (tmp_path / "may end").touch()
        return [mine]

    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\ndef reward(record, text):\n"
        "    while not Path(record['file']).with_name('may end').exists():\n        time.sleep(0.01)\n    return 1.0\n"
    )
    monkeypatch.setattr("ds_finetune.trainer.rollouts.sampling.all_gather_object", meet)
    monkeypatch.setattr("ds_finetune.trainer.rollouts.sampling._MEETING_SECONDS", 0.01)
    seen.touch()
    with open_rewards([section_of({"reward": f"{tmp_path}/slow.py:reward", "timeout": 240})], workers=1) as rewards:
        sampler = Sampler(_run_of(), partial(_start, seen=seen), rewards, SimpleNamespace(restart_limit=None), _texts())  # type: ignore[arg-type]
        found = sampler.sample(_Rows(seen), [(7, 0), (8, 1)], 3).groups()  # type: ignore[arg-type]
    assert found is not None
    assert len(found) == 2
    assert meetings[:3] == [False] * 3
    assert meetings[-2] is True


def test_held_out_prompts_have_other_noise_than_those_of_training() -> None:
    """And a stop is asked for between batches."""
    given: list[Any] = []
    over = SimpleNamespace(groups=lambda: None)
    sampler = SimpleNamespace(sample=lambda rows, prompts, size, **keys: given.append((prompts, keys)) or over)
    config = SimpleNamespace(rollout=SimpleNamespace(eval_samples=4), eval=SimpleNamespace(limit=3))
    run = SimpleNamespace(inputs=SimpleNamespace(held_out={"eval": range(9)}), config=config)
    source = SimpleNamespace(sampler=sampler, run=run)
    assert RewardEvaluation(source, lambda: True).scores() is None  # type: ignore[arg-type]
    ((prompts, keys),) = given
    assert [number for _, number in prompts] == [0, 1, 2]
    assert all(draw < 0 for draw, _ in prompts)
    assert keys["is_over"]()


def test_samples_show_the_reference_answer_that_rewards_read() -> None:
    rows = SimpleNamespace(record=lambda number: {"extra": {"truth": 7}, "answer": "other"})
    sections = [section_of({"reward": "exact_match", "column": "extra.truth"})]
    run = SimpleNamespace(inputs=SimpleNamespace(held_out={"eval": rows}), config=SimpleNamespace(rewards=sections))
    texts = SimpleNamespace(prompt_text=lambda rows, number: "1+1", text=lambda answer: "2")
    evaluation = RewardEvaluation(SimpleNamespace(sampler=SimpleNamespace(texts=texts), run=run), lambda: False)  # type: ignore[arg-type]
    (sample,) = evaluation._samples("eval", [group(0, [[1, 0]])])
    assert sample.expected == "7"


@pytest.mark.parametrize(("ids", "text"), [([1, 2, 9], "12"), ([1, 2, 7, 8], "12"), ([1, 2, 3], "123"), ([9], "")])
def test_rewards_do_not_see_what_ends_an_answer(ids: list[int], text: str) -> None:
    """Neither the end token, which is 9 here, nor a text that ends answers."""
    texts = replace(_texts(), rollout=RolloutConfig(stop=("78",)))
    assert texts.text(SampledAnswer(np.array(ids), np.zeros(len(ids), np.float32), "stop")) == text


def test_ids_without_a_token_are_not_drawn() -> None:
    assert allowed_ids({"a": 0, "b": 1}, 2) is None
    found = allowed_ids({"a": 0, "b": 2, "of another model": 9}, 4)
    assert found is not None
    assert torch.equal(found, torch.tensor([True, False, True, False]))


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right: int, k: int) -> None:
    answers = [True] * right + [False] * (5 - right)
    draws = [any(drawn) for drawn in combinations(answers, k)]
    assert pass_at(k, samples=5, right=right) == pytest.approx(sum(draws) / len(draws))


def test_held_out_answers_to_which_no_reward_applies() -> None:
    """They count as wrong, with a reward of 0, and no metric is NaN."""
    groups = [group(0, [[NAN, NAN], [NAN, NAN]]), group(1, [[NAN, NAN], [NAN, NAN]])]
    found = held_out_scores(groups, groups).metrics
    assert found["cut"] == 0
    assert {found[name] for name in ("reward", "sampled_reward", "pass_at_1", "sampled_pass_at_1", "pass_at_2")} == {0}


def test_powers_of_two_and_all_samples_are_reported() -> None:
    assert [*pass_shares([0], samples=1)] == ["sampled_pass_at_1"]
    assert [*pass_shares([0, 3], samples=4)] == ["sampled_pass_at_1", "pass_at_2", "pass_at_4"]
    assert [*pass_shares([6], samples=6)] == ["sampled_pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]
