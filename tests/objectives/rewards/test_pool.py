"""Rewards in their processes: what they get and return, and all that may go wrong with them."""

import os
import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_finetune.errors import ConfigError, RewardError
from ds_finetune.objectives.rewards import worker
from ds_finetune.objectives.rewards.answers import AnswerToScore
from ds_finetune.objectives.rewards.pool import open_rewards
from ds_finetune.objectives.rewards.worker import needs_of
from ds_finetune.system.processes import began_at, has_ended
from tests.objectives.rewards.scoring import FILE, answer_of, scores_of, section_of

RIGHT, WRONG = answer_of("4"), answer_of("five")
LATE = 0.3
LONGEST = 240
"""Seconds after which a test fails that waits for something; it takes a few."""


def test_scores_of_several_rewards_for_several_answers() -> None:
    sections = ["exact_match", ":only_numbers", {"reward": ":waits", "weight": 0.5, "name": "later"}]
    answers = [RIGHT, WRONG, answer_of("5"), answer_of("")] * 20
    with open_rewards([section_of(each) for each in sections], workers=3) as rewards:
        assert rewards.names == ("exact_match", "only_numbers", "later")
        assert rewards.weights.tolist() == [1.0, 1.0, 0.5]
        first, second = rewards.start(answers), rewards.start(answers[:1])
        expected = [[1, 1, 1], [0, np.nan, 0], [0, 1, 0], [0, np.nan, 0]] * 20
        np.testing.assert_array_equal(first.result(), expected)
        np.testing.assert_array_equal(second.result(), expected[:1])
        assert first.has_result()[:4, 0].tolist() == [1, 1, 1, 0]
        assert np.isnan(first.has_result()[:, 1:]).all()
        assert rewards.start().result().shape == (0, 3)


def test_file_descriptors_may_have_large_numbers() -> None:
    """select(2) takes none from 1024 on; a rank of a large cluster has as many sockets."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, most[1]), most[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert scores_of(["exact_match"], [RIGHT, WRONG]).tolist() == [[1], [0]]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_what_a_function_gets() -> None:
    assert scores_of([":everything", ":any_arguments"], [RIGHT]).tolist() == [[6, len(worker.ARGUMENTS)]]


def test_scores_may_be_numbers_of_numpy() -> None:
    assert scores_of([":of_numpy"], [answer_of(text) for text in "4567"]).tolist() == [[1], [0.5], [0.25], [3]]


FAULTS = [
    ("not_a_number", "it returned nan, and should return a finite number"),
    ("infinite", "it returned inf"),
    ("too_large", "it returned inf, and should return a finite number"),
    ("raises_what_has_no_text", "it ended its process with exit code 1, twice"),
    ("a_text", "it returned str 'good'"),
    ("a_list", "it returned 2 scores ([1.0, 0.0]), and should return one for one answer"),
    ("raises", "it raised ZeroDivisionError: division by zero at"),
    ("leaves", "it raised SystemExit: 0"),
    ("loops", f"it took more than {LATE} seconds"),
    ("sleeps", f"it took more than {LATE} seconds"),
    ("ends_process", "it ended its process with exit code 7, twice"),
    ("is_killed", "it ended its process with signal SIGKILL, twice"),
    ("takes_memory", "it raised MemoryError"),
]


@pytest.mark.parametrize(("name", "message"), FAULTS, ids=[name for name, _ in FAULTS])
def test_a_reward_at_fault_is_an_error_that_names_reward_record_and_answer(name: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RewardError) as raised:
        scores_of(["exact_match", {"reward": f":{name}", "timeout": LATE}], [RIGHT, WRONG])
    text = str(raised.value)
    assert f"reward `{name}` failed on rows.jsonl line 7, answer 3: {message}" in text
    assert "answer: '4'" in text
    assert 'record: {"answer": "4"}' in text
    assert "hint:" in text
    assert raised.value.exit_code == 1
    assert time.monotonic() - began < LONGEST


def test_a_reward_that_hangs_in_c_is_killed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_finetune.objectives.rewards.pool.GRACE_SECONDS", LATE)
    with pytest.raises(RewardError, match=r"took more than 0\.3 seconds.*its process was killed"):
        scores_of([{"reward": ":hangs_in_c", "timeout": LATE}], [RIGHT])


@pytest.mark.parametrize("name", ["hangs_in_c", "ends_process", "not_a_number"])
def test_other_rewards_count_where_one_is_at_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those after it, and each of them is computed once."""
    monkeypatch.setattr("ds_finetune.objectives.rewards.pool.GRACE_SECONDS", LATE)
    sections = [":counts_calls", {"reward": f":{name}", "timeout": LATE}, "exact_match", {"reward": ":waits"}]
    calls = tmp_path / "calls"
    with open_rewards([section_of(each) for each in sections], workers=1) as rewards:
        pending = rewards.start([answer_of(text, {"answer": "4", "file": str(calls)}) for text in ("4", "5")])
        assert [[part.get("score") for part in parts] for parts in pending.parts()] == [
            [1, None, 1, 1],
            [2, None, 0, 0],
        ]
        assert [["error" in part for part in parts] for parts in pending.parts()] == [[False, True, False, False]] * 2


def test_other_rewards_count_where_the_answer_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a formula of `math` on which a library does not return."""
    monkeypatch.setattr("ds_finetune.objectives.rewards.pool.GRACE_SECONDS", LATE)
    late = {"score": -0.5, "has_result": False}
    monkeypatch.setattr("ds_finetune.objectives.rewards.pool.late_part", lambda settings, end: late)
    sections = ["exact_match", {"reward": ":hangs_in_c", "timeout": LATE}, ":waits"]
    assert scores_of(sections, [RIGHT, WRONG]).tolist() == [[1, -0.5, 1], [0, -0.5, 0]]


def test_the_process_that_hangs_in_c_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    kept, program = tmp_path / "pid", "from tests.objectives.rewards.scoring import *\n"
    program += f"scores_of([':names_itself_and_hangs'], [answer_of('4', {{'file': {str(kept)!r}}})])"
    started = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + LONGEST
    while not (kept.exists() and kept.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.kill()
    started.wait()
    wait_for_end(int(kept.read_text()), deadline)


def wait_for_end(pid: int, deadline: float) -> None:
    while (began := began_at(pid)) and not has_ended(pid, began):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_was_killed_is_started_again_for_the_same_answer(tmp_path: Path) -> None:
    answers = [answer_of(str(n), {"file": str(tmp_path / f"{n}")}) for n in range(3)]
    assert scores_of([":is_killed_once", ":waits"], answers).tolist() == [[0.5, 0], [0.5, 0], [0.5, 0]]


def test_a_scheduler_that_ends_the_run_does_not_end_rewards() -> None:
    assert scores_of([":is_asked_to_end"], [RIGHT, answer_of("5")]).tolist() == [[4], [5]]


def test_the_second_process_of_a_forked_reward_is_not_heard() -> None:
    assert scores_of([":forks", "exact_match"], [RIGHT, WRONG, RIGHT]).tolist() == [[0.25, 1], [0.25, 0], [0.25, 1]]


def test_what_a_reward_starts_ends_with_it(tmp_path: Path) -> None:
    kept = tmp_path / "pid"
    with pytest.raises(RewardError, match="ended its process with exit code 1, twice"):
        scores_of([":leaves_a_process"], [answer_of("4", {"file": str(kept)})])
    wait_for_end(int(kept.read_text()), time.monotonic() + LONGEST)


@pytest.mark.parametrize("line", ["stray\n", '{"score": 1.0, "has_result": null, "read": "", "seconds": 0}\n', "[]\n"])
def test_a_line_of_a_reward_in_the_connection_is_no_score(line: str) -> None:
    """It ends the process; the scores of the answers after it are their own."""
    answers = [answer_of("4"), answer_of("stray", {"line": line}), answer_of("5"), answer_of("4")]
    with open_rewards([section_of(":writes_into_connections")], workers=1) as rewards:
        first, stray, *after = [parts[0] for parts in rewards.start(answers).parts()]
    assert [part["score"] for part in (first, *after)] == [1, 0, 1]
    assert "into the connection of its process, which ended, twice" in stray["error"]


def test_what_a_reward_prints_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rewards.log"
    assert scores_of([":prints"], [RIGHT, WRONG], log=log).tolist() == [[1], [1]]
    assert capfd.readouterr() == ("", "")
    assert log.read_text().count("written by the reward") == 2
    assert "an error line" in log.read_text()
    with pytest.raises(RewardError, match=f"what it printed is in {log}"):
        scores_of([":raises"], [RIGHT], log=log)
    assert "ZeroDivisionError" in log.read_text()


def test_a_long_log_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_finetune.objectives.rewards.pool._LOG_BYTES", 10_000)
    log = tmp_path / "rewards.log"
    scores_of([":prints"], [RIGHT] * 20, log=log)
    assert log.stat().st_size < 10_000
    assert "This log had more than 10,000 bytes and was emptied here." in log.read_text()


def test_answers_are_not_scored_after_the_end() -> None:
    began = time.monotonic()
    with open_rewards([section_of({"reward": ":loops", "timeout": 10_000})], workers=2) as rewards:
        rewards.start([RIGHT] * 50)
    assert time.monotonic() - began < LONGEST


def test_a_long_answer_of_a_program_is_the_answers_fault() -> None:
    section = {"reward": "code", "timeout": LATE, "unparsed": -1.0}
    loop = answer_of("```python\nwhile True: pass\n```", {"tests": "assert True"})
    assert scores_of([section], [loop]).tolist() == [[0]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "needs a function `absent`"),
        ("NO_FUNCTION", "needs a function `NO_FUNCTION`"),
        ("of_trl", r"has the arguments completions, kwargs; it is called for one answer"),
    ],
)
def test_a_file_without_such_a_function(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scores_of([f":{function}"], [])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("def reward(text): return 1 +", "cannot be imported: SyntaxError"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("import sys; sys.exit()", "cannot be imported: SystemExit"),
        ("import os; os._exit(3)", "does not work: it ended its process with exit code 3"),
    ],
)
def test_a_file_that_cannot_be_imported(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        scores_of([f"{tmp_path}/mine.py:reward"], [])
    with pytest.raises(ConfigError, match=r"none\.py:reward` does not work: it cannot be imported: FileNotFoundError"):
        scores_of([f"{tmp_path}/none.py:reward"], [])


def test_a_file_imports_its_neighbours_and_no_torch(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text(
        "import sys\nHEAVY = {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    (tmp_path / "mine.py").write_text("from neighbour import HEAVY\ndef reward(text): return len(HEAVY)")
    assert scores_of([f"{tmp_path}/mine.py:reward"], [RIGHT]).tolist() == [[0]]


@pytest.mark.parametrize(
    ("section", "record", "message"),
    [
        ("exact_match", {"question": "2+2"}, "needs column `answer`, and the record has question"),
        ("exact_match", {"answer": None}, "needs column `answer`"),
        ("exact_match", {"answer": " "}, "cannot use column `answer`: it is str ' '"),
        ("exact_match", {"answer": []}, "cannot use column `answer`: it is list"),
        ("number", {"answer": "four"}, "cannot use column `answer`: it is 'four', which has no number"),
        ("choice", {"answer": "none"}, "has no letter of a choice"),
        ("choice", {"answer": True}, "is True, which has no letter of a choice"),
        ("code", {"answer": "x"}, "needs column `tests`"),
        ("code", {"tests": [1, 2]}, "should be Python code"),
        ("code", {"tests": {"inputs": ["1"], "outputs": []}}, "should be Python code"),
        ({"reward": "number", "column": "extra.truth"}, {"extra": {"answer": 1}}, "needs column `extra.truth`"),
    ],
)
def test_records_without_what_a_reward_needs(section: Any, record: dict[str, Any], message: str) -> None:
    with open_rewards([section_of("format"), section_of(section)], workers=1) as rewards:
        assert message in needs_of([section_of(section).settings], record)
        with pytest.raises(RewardError) as raised:
            rewards.start([answer_of("4", record)]).result()
        assert message in str(raised.value)


def test_many_answers_and_long_ones() -> None:
    answers = [answer_of(str(n), {"answer": str(n), "text": "x" * 100_000}) for n in range(50)]
    assert scores_of(["exact_match"], answers, workers=2).tolist() == [[1]] * 50


def test_a_reward_has_a_record_of_its_own() -> None:
    sections = [":changes_its_record", {"reward": ":changes_its_record", "name": "again"}, "exact_match"]
    assert scores_of(sections, [RIGHT, RIGHT]).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_file_with_the_name_of_another_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(
        "CALLS = []\ndef one(text): CALLS.append(1); return len(CALLS)\ndef two(text): return len(CALLS)"
    )
    assert scores_of([f"{tmp_path}/json.py:one", f"{tmp_path}/json.py:two"], [RIGHT]).tolist() == [[1, 1]]


def test_relative_files_are_those_of_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILE.parent)
    assert scores_of([f"{FILE.name}:right"], [RIGHT]).tolist() == [[1]]


def test_an_answer_has_all_that_the_process_gets() -> None:
    assert set(AnswerToScore.__dataclass_fields__) == {"record", "prompt", "text", "ids", "finish", "where"}


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is an optional package")
def test_a_formula_that_takes_too_long_is_the_answers_fault() -> None:
    answers = [answer_of(r"\boxed{9^{9^{9^{9}}}}"), answer_of(r"\boxed{4.0}")]
    section = {"reward": "math", "timeout": 5 * LATE, "unparsed": -0.25}
    assert scores_of([section], answers).tolist() == [[-0.25], [1]]


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="it is about a package that is missing")
def test_a_reward_without_its_package() -> None:
    with pytest.raises(ConfigError, match="reward `math` does not work: it needs the package math-verify"):
        scores_of(["math"], [])
