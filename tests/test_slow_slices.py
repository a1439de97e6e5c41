"""Slow tests run in slices that resume: what is left, in which order, and what the record says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "slow_slices.py"
TESTS = [f"a.py::t[{number}]" for number in range(5)] + ["b.py::t"]


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("slow_slices", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slow_slices"] = module
    spec.loader.exec_module(module)
    return module


scripts = _script()


def _record(name: str, commit: str, failed: int, date: str) -> dict[str, object]:
    return {"slice": name, "commit": commit, "failed": failed, "date": date}


def test_slices_hold_every_test_once_and_are_named_by_them() -> None:
    every = scripts.slices(TESTS, 2)
    assert [test for each in every for test in each.tests] == TESTS
    assert [len(each.tests) for each in every] == [2, 2, 1, 1]
    other = scripts.slices(["a.py::other", *TESTS[1:]], 2)
    assert [one.name == two.name for one, two in zip(every, other, strict=True)] == [False, True, True, True]


def test_what_never_ran_comes_first_and_what_passed_here_is_left_out() -> None:
    one, two, three, four = scripts.slices(TESTS, 2)
    records = [
        _record(one.name, "c", 1, "2026-01-01"),
        _record(one.name, "c", 0, "2026-01-04"),
        _record(two.name, "old", 0, "2026-01-03"),
        _record(three.name, "c", 2, "2026-01-02"),
    ]
    left = scripts.to_run([one, two, three, four], scripts.newest(records), "c")
    assert left == [four, three, two]


def test_a_run_is_recorded_and_resumed(tmp_path: Path) -> None:
    """A test of this suite that is quick and slow by its mark, in a checkout of its own."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    tests = "import pytest\npytestmark = pytest.mark.slow\n"
    tests += '@pytest.mark.parametrize("n", range(3))\ndef test_n(n):\n    assert n != 2\n'
    (tmp_path / "test_it.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "t"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    command = [sys.executable, f"scripts/{SCRIPT.name}", "--size", "2", "--record", "ran.jsonl"]
    codes = [subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode for _ in range(2)]
    assert codes == [1, 1]
    records = [json.loads(line) for line in (tmp_path / "ran.jsonl").read_text().splitlines()]
    assert [(each["passed"], each["failed"]) for each in records] == [(2, 0), (0, 1), (0, 1)]
    assert records[1]["failing"] == ["test_it::test_n[2]"]
    status = subprocess.run([*command, "--status"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert status.splitlines()[1].split() == ["3", "3", "3", "1", records[0]["date"][:10], "test_it.py"]
