"""The pages that are served: runs of a folder and nothing else, later points of the same charts, bad input."""

import json
import os
import shutil
import socket
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ds_finetune.cli.main import main
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.page import TEMPLATES, bokehjs
from ds_finetune.runs.watch import MOST_COMPARED, make_app
from tests.conftest import ROOT
from tests.runs.report.test_page import PageParser
from tests.runs.test_folder import make_run, own_status

ODD = '<img src=x onerror=alert(1)> & "quotes" \'é'


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", steps=5)
    make_run(tmp_path / "runs" / "deep" / ODD)
    return tmp_path / "runs"


def _client(root: Path) -> TestClient:
    return TestClient(make_app(root), base_url="http://127.0.0.1")


def _rows(root: Path) -> dict[str, str]:
    """The text of each row of the table by the name of its run."""
    text = _client(root).get("/").text
    rows = text[text.index("<tbody>") : text.index("</tbody>")].split("<tr>")[1:]
    return {unescape(row.partition('value="')[2].partition('"')[0]): unescape(row) for row in rows}


def _charts(client: TestClient, *runs: str, **query: str) -> list[dict[str, Any]]:
    """The charts of the page of runs."""
    answer = client.get("/run", params={"run": runs, **query})
    assert answer.status_code == 200, answer.text
    return json.loads(PageParser(answer.text).scripts[0])


def _points(charts: list[dict[str, Any]]) -> dict[str, Any]:
    """The first line of the first chart."""
    return charts[0]["lines"][0]


def _add(run: Path, *records: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def test_the_table_has_the_runs_with_their_state_and_eta(runs: Path) -> None:
    own_status().write(runs / "a")
    many = {f"eval/set {number}/loss": 0.5 for number in range(1000)}
    _add(runs / "a", {"step": 6, "train/loss": 0.5, "perf/eta_seconds": 90.0, **many})
    rows = _rows(runs)
    assert list(rows) == ["a", f"deep/{ODD}"], "those that run come first"
    for text in ("running", "6 of 9", ">2 min<", "0.5000"):
        assert text in rows["a"], text
    assert "unknown" in rows[f"deep/{ODD}"]


def test_the_page_is_that_of_the_report(runs: Path) -> None:
    (runs / "a" / "log.txt").write_text("step 1\n<b>step 2</b>\n")
    (runs / "a" / "ranks.jsonl").write_text('{"step": 5, "seconds": [0.1, 0.4]}\n{"step": 6, "sec')
    (runs / "a" / "status.json").write_text('{"state": "hung", "reason": "rank 1 does not answer"}')
    (runs / "a" / "watchdog").mkdir()
    (runs / "a" / "watchdog" / "report.txt").write_text("rank 1 does not answer\n  stacks")
    page = PageParser(_client(runs).get("/run?run=a").text)
    for text in ("hung", "rank 1 does not answer"):
        assert text in page.sections["top"]
    assert "<b>step 2</b>" in page.sections["log"]
    assert "  stacks" in page.sections["log"]
    assert list(page.sections) == ["top", "curves", "ranks", "plan", "log", "repeat"]


def test_eta_of_the_page_is_that_of_the_line(runs: Path) -> None:
    own_status().write(runs / "a")
    _add(runs / "a", {"step": 6, "train/loss": 0.5, "perf/eta_seconds": 90.0})
    top = PageParser(_client(runs).get("/run?run=a").text).sections["top"]
    assert "eta2 min" in "".join(top.split("\n"))
    assert "make it again" not in top


def test_later_points_are_in_the_same_lines(runs: Path) -> None:
    client = _client(runs)
    first = _charts(client, "a")
    assert _points(first)["x"] == [1, 2, 3, 4, 5]
    _add(runs / "a", {"step": 6, "train/loss": 0.5}, {"step": 7, "train/loss": None})
    later = _charts(client, "a", library="no")
    assert (_points(later)["x"], _points(later)["y"][-2:]) == ([1, 2, 3, 4, 5, 6, 7], [0.5, None])
    # A resumed run replaces the file.
    (runs / "a" / "new").write_text('{"step": 1, "train/loss": 3.0}\n{"step": 8, "train/loss": 2.0}\n')
    (runs / "a" / "new").rename(runs / "a" / "metrics.jsonl")
    assert _points(_charts(client, "a", library="no"))["x"] == [1, 8]


def test_runs_are_compared_with_later_points_of_each(runs: Path) -> None:
    client = _client(runs)
    make_run(runs / "b", steps=3)
    assert [line["name"] for line in _charts(client, "a", "b")[0]["lines"]] == ["a", "b"]
    _add(runs / "b", {"step": 4, "train/loss": 7.0})
    later = _charts(client, "a", "b", library="no")
    assert [line["x"][-1] for line in later[0]["lines"]] == [5, 4]


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "deep", "", "a/../a", "a\0", "link", "deep/link"])
def test_paths_outside_the_folder_and_what_is_no_run_are_not_found(runs: Path, name: str) -> None:
    make_run(runs.parent / "secret")
    (runs / "link").symlink_to(runs.parent / "secret")
    (runs / "deep" / "link").symlink_to(runs.parent / "secret", target_is_directory=True)
    assert _client(runs).get("/run", params={"run": name}).status_code == 404


def test_a_run_that_becomes_a_link_to_elsewhere_is_read_no_more(runs: Path) -> None:
    client = _client(runs)
    secret = make_run(runs.parent / "secret", steps=7)
    (secret / "log.txt").write_text("secret")
    (secret / "status.json").write_text('{"state": "failed", "reason": "secret"}')
    assert _points(_charts(client, "a"))["x"][-1] == 5
    shutil.rmtree(runs / "a")
    (runs / "a").symlink_to(secret)
    for path in ("/", "/run"):
        text = client.get(path, params={"run": "a"}).text
        assert "secret" not in text.replace(str(runs), "")
        assert "[1,2,3,4,5,6,7]" not in text
        assert "7 of" not in text


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/run", 400),
        ("/run?" + "&".join(f"run={number}" for number in range(MOST_COMPARED + 1)), 400),
        ("/nothing", 404),
    ],
)
def test_wrong_requests_are_refused(runs: Path, path: str, code: int) -> None:
    assert _client(runs).get(path).status_code == code


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_page_only_reads(runs: Path, method: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    client = _client(runs)
    assert {client.request(method, path).status_code for path in ("/", "/run?run=a")} == {405}
    assert client.get("/run?run=a").status_code == 200
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


def test_a_damaged_folder_leaves_the_others_in_the_table(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = runs / os.fsdecode(b"l\xe4uft")
    odd.mkdir()
    digits = "1" + "0" * 400
    (odd / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": {digits}}}\n')
    (odd / "status.json").write_text(f'{{"state": "running", "limit_seconds": {digits}}}')
    make_run(runs / "nested")
    (runs / "nested" / "status.json").write_text('{"state": ' + "[" * 30_000)
    rows = _rows(runs)
    assert len(rows) == 4
    assert all("unknown" in row for row in rows.values())
    assert _client(runs).get("/run", params={"run": "l\\udce4uft"}).status_code == 200
    monkeypatch.setattr(RunFolder, "status", property(lambda run: 1 // (run.name != "a")))
    assert "ZeroDivisionError" in _rows(runs)["a"]


def test_a_run_with_odd_values_is_shown(runs: Path) -> None:
    (runs / "a" / "config.yaml").write_text("a: &x {b: *x}\n")
    (runs / "a" / "samples.jsonl").write_text(
        '{"step": 1, "name": "eval", "prompt": "\\ud800", "answer": "", "expected": ""}\n'
    )
    (runs / "a" / "ranks.jsonl").write_text('{"step": 99999999999999999999, "seconds": [0.1]}\n')
    (runs / "a" / "starts.jsonl").write_text('{"time": NaN, "steps": 9}\n')
    assert "\\ud800" in PageParser(_client(runs).get("/run?run=a").text).sections["answers"]
    page = PageParser(_client(runs).get("/run", params={"run": ["a", f"deep/{ODD}"]}).text)
    assert "config.yaml is no YAML: `*x` in line 1 contains itself" in page.sections["top"]


def test_a_folder_whose_metrics_have_no_steps_is_one_error(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = runs / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n{"iteration": 2, "loss": 1.0}\n')
    answer = _client(runs).get("/run?run=old")
    assert (answer.status_code, str(old) in answer.text, "`step`" in answer.text) == (422, True, True)
    assert main(["report", str(old)]) == 2
    error = capsys.readouterr().err
    assert f"the run in `{old}` cannot be read: 2 of 2 lines of metrics.jsonl are no records of a step" in error
    assert "key `step`" in error


def test_scripts_are_those_of_the_package_and_the_policy_allows_no_other(runs: Path) -> None:
    client = _client(runs)
    text = client.get("/run?run=a").text
    script = (TEMPLATES / "page.js").read_text()
    assert PageParser(text).scripts[1:] == [bokehjs(), script]
    assert "innerHTML =" not in script
    assert "http" not in script
    assert "default-src 'none'; base-uri 'none'; form-action 'self'; connect-src 'self';" in text
    assert len(client.get("/run?run=a&library=no").content) < 50_000


def test_watch_starts_without_torch() -> None:
    code = "import sys, ds_finetune.cli.main, ds_finetune.runs.watch; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_cannot_be_watched_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
