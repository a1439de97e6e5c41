"""Run folders as they are found: whole, being written, of another version, no run, or linked to elsewhere."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ds_finetune.runs import folder
from ds_finetune.runs.folder import RunFolder, find_runs
from ds_finetune.runs.metrics import Sample
from ds_finetune.runs.status import SILENT_SECONDS, RunStatus, mark_ended, seen_status
from ds_finetune.system import processes
from ds_finetune.system.processes import began_at, own_namespace


def make_run(folder: Path, *, steps: int = 3) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("optim: {lr: 0.001}\n")
    (folder / "plan.json").write_text('{"layout": "dp 1", "notes": []}')
    records = [{"step": step, "train/loss": 3.0 / step} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def own_status() -> RunStatus:
    """The status of a run whose rank zero is this process."""
    return RunStatus(
        "running",
        phase="step",
        step=2,
        steps=9,
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_namespace=own_namespace("pid"),
        began=began_at(os.getpid()),
    )


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "b" / "c")
    make_run(tmp_path / "a<b>")
    make_run(tmp_path / "a<b>" / "inner")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(make_run(tmp_path.parent / f"{tmp_path.name}-elsewhere"))
    assert [run.name for run in find_runs(tmp_path)] == ["a<b>", "b/c"]
    assert [run.name for run in find_runs(tmp_path / "b" / "c")] == ["c"]


def test_a_folder_with_many_runs_shows_the_first_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MOST_RUNS", 2)
    for name in "abc":
        make_run(tmp_path / name)
    assert [run.name for run in find_runs(tmp_path)] == ["a", "b"]


def test_what_a_run_leaves_is_read(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    assert (run.config, run.recorded("plan.json")["layout"]) == ({"optim": {"lr": 0.001}}, "dp 1")
    assert run.versions == {}
    sample = Sample(2, "eval", "1 + 1 = <", "2", "2")
    line = json.dumps(asdict(sample))
    (run.path / "samples.jsonl").write_text(f'{line}\n{{"step": 3}}\n{line[:10]}')
    (run.path / "starts.jsonl").write_text('{"versions": {"torch": "3"}}\n{"ver')
    assert run.records("samples.jsonl") == [json.loads(line), {"step": 3}]
    assert run.versions == {"torch": "3"}
    (run.path / "log.txt").write_bytes(b"first\n" + b"x" * 20_000 + b"\nlast \xff\n")
    assert run.tail("log.txt", 16_384) == "last \ufffd\n"
    assert run.problems == []


def test_unreadable_files_are_absent_and_named(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    (run.path / "config.yaml").write_text("a: [")
    (run.path / "plan.json").write_text("[]")
    (run.path / "samples.jsonl").mkdir()
    os.mkfifo(run.path / "log.txt")
    assert (run.config, run.recorded("plan.json"), run.records("samples.jsonl"), run.tail("log.txt")) == (
        {},
        {},
        [],
        "",
    )
    assert [problem.split()[0] for problem in run.problems] == ["config.yaml"]


def test_a_configuration_that_would_grow_without_end_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    merged = [f"x{i}: &x{i} {{<<: [{', '.join(9 * [f'*x{i - 1}'])}]}}\n" for i in range(1, 12)]
    for text in ("x0: &x0 {k: 1}\n" + "".join(merged), "[" * 900_000, "a: &a [*a]\n", "a: 2001-99-99\n"):
        (folder / "config.yaml").write_text(text)
        run = RunFolder(folder)
        assert run.config == {}
        assert run.problems[0].startswith("config.yaml is no YAML: ")


def test_links_to_files_outside_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a: 1")
    run = RunFolder(make_run(tmp_path / "runs" / "run"), within=tmp_path / "runs")
    for name in ("config.yaml", "plan.json", "log.txt", "status.json"):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(secret)
    assert (run.config, run.recorded("plan.json"), run.tail("log.txt")) == ({}, {}, "")
    assert run.status.state == "unknown"
    assert len(run.problems) == 4
    assert "is a link to a file outside" in run.problems[0]


def test_a_folder_that_vanishes_is_empty(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "gone")
    assert (run.config, run.recorded("plan.json"), run.records("samples.jsonl"), run.exports) == ({}, {}, [], {})
    assert run.status.state == "unknown"


def test_a_running_run_is_seen_to_hang_or_to_be_gone(tmp_path: Path) -> None:
    status, now = own_status(), time.time()
    status.write(tmp_path)
    assert seen_status(tmp_path) == status
    seen = seen_status(tmp_path, now=now + SILENT_SECONDS + 5)
    assert (seen.state, "is stopped or does not react" in seen.reason) == ("hung", True)
    replace(status, idle_seconds=70.0, limit_seconds=60.0).write(tmp_path)
    seen = seen_status(tmp_path)
    assert (seen.state, "no progress for 70 s, and the limit is 60 s" in seen.reason) == ("hung", True)
    replace(status, host="elsewhere").write(tmp_path)
    assert seen_status(tmp_path).state == "running"
    seen = seen_status(tmp_path, now=now + SILENT_SECONDS + 5)
    assert (seen.state, "no sign of life" in seen.reason) == ("failed", True)


@pytest.mark.skipif(not own_namespace("pid"), reason="processes are told apart by /proc")
def test_a_run_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    replace(own_status(), pid=child.pid, began=began_at(child.pid)).write(tmp_path)
    assert seen_status(tmp_path).state == "running"
    child.kill()
    child.wait()
    seen = seen_status(tmp_path)
    assert (seen.state, "its process has ended without a message" in seen.reason) == ("failed", True)


def test_the_first_end_of_a_run_remains(tmp_path: Path) -> None:
    mark_ended(tmp_path, "failed", "not begun")
    assert not list(tmp_path.iterdir())
    own_status().write(tmp_path)
    mark_ended(tmp_path, "hung", "rank 1 does not answer", step=5)
    mark_ended(tmp_path, "failed", "a consequence")
    seen = seen_status(tmp_path)
    assert (seen.state, seen.reason, seen.step) == ("hung", "rank 1 does not answer", 5)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"state": "dancing"}',
        '{"state": "running", "step": "x"}',
        "{",
        '{"state": "running", "step": 1' + "0" * 400 + "}",
        '{"state": ' + "[" * 30_000,
    ],
)
def test_a_status_of_another_program_is_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert seen_status(tmp_path).state == "unknown"


def test_the_status_of_a_later_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"format": 2, "state": "finished", "step": 4, "colour": "red"}')
    assert (seen_status(tmp_path).state, seen_status(tmp_path).step) == ("finished", 4)


def test_a_process_that_proc_hides_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_status().write(tmp_path)
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert not processes.has_ended(os.getpid(), "1")
    assert not processes.has_ended(1, "1")
    assert all(processes.has_ended(pid, "1") for pid in (0, -1, 2**22 + 1, 2**70))
    assert seen_status(tmp_path).state == "running"
    seen = seen_status(tmp_path, now=time.time() + SILENT_SECONDS + 5)
    assert (seen.state, "no sign of life" in seen.reason) == ("failed", True)
