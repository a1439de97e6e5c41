"""The page's requests: runs of a folder and nothing else, live points, downsampled curves, bad input."""

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ds_finetune.checkpoint.commit import Manifest
from ds_finetune.cli.main import main
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.charts import PLOTS, bokehjs
from ds_finetune.runs.watch.app import STATIC, AccessRules, _Watcher, make_app
from ds_finetune.runs.watch.store import MOST_COMPARED, RunStore
from tests.conftest import ROOT
from tests.runs.test_folder import make_run, own_status

ODD = '<img src=x onerror=alert(1)> & "quotes" \'é'


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", steps=5)
    make_run(tmp_path / "runs" / "deep" / ODD)
    return tmp_path / "runs"


def _client(root: Path) -> TestClient:
    return TestClient(make_app(RunStore(root), AccessRules("127.0.0.1")), base_url="http://127.0.0.1")


def _get(root: Path, path: str, **query: Any) -> Any:
    answer = _client(root).get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_has_the_runs_with_their_state(runs: Path) -> None:
    own_status().write(runs / "a")
    first, second = _get(runs, "/api/runs")["runs"]
    assert (first["name"], first["state"], first["step"], first["steps"]) == ("a", "running", 5, 9)
    assert (first["loss"], first["preview"][-1]) == (0.6, 0.6)
    assert (second["name"], second["state"]) == (f"deep/{ODD}", "unknown")


def test_a_run_is_shown_with_what_its_folder_holds(runs: Path) -> None:
    (runs / "a" / "log.txt").write_text("step 1\n<b>step 2</b>\n")
    (runs / "a" / "ranks.jsonl").write_text('{"step": 5, "seconds": [0.1, 0.4]}\n{"step": 6, "sec')
    (runs / "a" / "status.json").write_text('{"state": "hung", "reason": "rank 1 does not answer"}')
    (runs / "a" / "watchdog").mkdir()
    (runs / "a" / "watchdog" / "report.txt").write_text("rank 1 does not answer\n  stacks")
    shown = _get(runs, "/api/run", run="a")
    assert (shown["state"], shown["reason"]) == ("hung", "rank 1 does not answer")
    assert (shown["log"], shown["watchdog"].splitlines()[1]) == ("step 1\n<b>step 2</b>\n", "  stacks")
    assert shown["rank_times"] == {"steps": [5], "lines": {"rank 0": [0.1], "rank 1": [0.4]}, "last": [0.1, 0.4]}
    assert (shown["settings"], shown["plan"], shown["problems"]) == ({"optim.lr": "0.001"}, {"layout": "dp 1"}, [])


def test_curves_are_downsampled_without_losing_a_spike(runs: Path) -> None:
    lines = [{"step": step, "train/loss": 9.0 if step == 777 else 1.0} for step in range(1, 3001)]
    lines[5]["train/loss"] = None  # type: ignore[assignment]
    (runs / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = _get(runs, "/api/curves", run="a", points=100)["a"]["curves"]["train/loss"]
    assert len(curve["steps"]) <= 100
    assert curve["values"][curve["steps"].index(777)] == 9.0
    assert curve["values"][curve["steps"].index(6)] is None
    assert (curve["steps"][0], curve["steps"][-1]) == (1, 3000)


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "deep", "", "a/../a", "a\0", "link", "deep/link"])
def test_paths_outside_the_folder_and_what_is_no_run_are_not_found(runs: Path, name: str) -> None:
    make_run(runs.parent / "secret")
    (runs / "link").symlink_to(runs.parent / "secret")
    (runs / "deep" / "link").symlink_to(runs.parent / "secret", target_is_directory=True)
    client = _client(runs)
    for path in ("/api/run", "/api/curves", "/api/stream"):
        assert client.get(path, params={"run": name}).status_code == 404


def test_a_run_that_becomes_a_link_to_elsewhere_is_read_no_more(runs: Path) -> None:
    client = _client(runs)
    secret = make_run(runs.parent / "secret", steps=7)
    (secret / "log.txt").write_text("secret")
    (secret / "status.json").write_text('{"state": "failed", "reason": "secret"}')
    assert client.get("/api/run", params={"run": "a"}).json()["step"] == 5
    shutil.rmtree(runs / "a")
    (runs / "a").symlink_to(secret)
    for path in ("/api/run", "/api/curves", "/api/runs"):
        text = client.get(path, params={"run": "a"}).text
        assert "secret" not in text.replace(str(runs), "")
        assert '"step": 7' not in text
        assert '"last_step":7' not in text


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/run", 400),
        ("/api/run?run=a&run=b", 400),
        ("/api/curves", 400),
        ("/api/curves?run=a&points=x", 400),
        ("/api/curves?run=a&points=99999999999999", 400),
        ("/api/curves?" + "&".join(f"run={place}" for place in range(MOST_COMPARED + 1)), 400),
        ("/static/..%2Fapp.py", 404),
        ("/static/../../app.py", 404),
        ("/static/nothing.js", 404),
        ("/api/nothing", 404),
    ],
)
def test_wrong_requests_are_refused(runs: Path, path: str, code: int) -> None:
    assert _client(runs).get(path).status_code == code


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_page_only_reads(runs: Path, method: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    client = _client(runs)
    assert {client.request(method, path).status_code for path in ("/", "/api/runs", "/api/run?run=a")} == {405}
    assert client.get("/api/run?run=a").status_code == 200
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


def test_a_damaged_folder_leaves_the_others_in_the_list(runs: Path) -> None:
    odd = runs / os.fsdecode(b"l\xe4uft")
    odd.mkdir()
    digits = "1" + "0" * 400
    (odd / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": {digits}}}\n')
    (odd / "status.json").write_text(f'{{"state": "running", "limit_seconds": {digits}}}')
    make_run(runs / "nested")
    (runs / "nested" / "status.json").write_text('{"state": ' + "[" * 30_000)
    rows = _get(runs, "/api/runs")["runs"]
    assert [row["name"] for row in rows] == ["a", f"deep/{ODD}", odd.name, "nested"]
    assert [row["state"] for row in rows] == ["unknown"] * 4


def test_a_row_that_cannot_be_read_has_all_fields(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _get(runs, "/api/runs")["runs"]
    monkeypatch.setattr(RunFolder, "status", property(lambda run: 1 // (run.name != "a")))
    row = RunStore(runs).rows()[0]
    assert (row.keys(), row["state"], "ZeroDivisionError" in row["reason"]) == (whole.keys(), "unknown", True)


def test_a_run_with_odd_values_is_shown(runs: Path) -> None:
    checkpoint = runs / "a" / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(Manifest(2, 1, (0,), "host", "token", math.nan, {}).text())
    (runs / "a" / "config.yaml").write_text("a: &x {b: *x}\n")
    (runs / "a" / "samples.jsonl").write_text(
        '{"step": 1, "name": "eval", "prompt": "\\ud800", "answer": "", "expected": ""}\n'
    )
    (runs / "a" / "ranks.jsonl").write_text('{"step": 99999999999999999999, "seconds": [0.1]}\n')
    (runs / "a" / "starts.jsonl").write_text('{"time": NaN, "steps": 9}\n')
    shown = _get(runs, "/api/run", run="a")
    assert (shown["checkpoints"][0]["eval_loss"], shown["samples"][0]["prompt"]) == (None, "\ud800")
    assert (shown["settings"], shown["rank_times"], shown["starts"]) == ({}, {}, [{"time": None, "steps": 9}])
    assert "config.yaml is no YAML: `*x` in line 1 contains itself" in shown["problems"][0]
    (runs / "a" / "config.yaml").write_text(
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    )
    assert _get(runs, "/api/run", run="a")["settings"] == {}


async def _next(events: Any) -> dict[str, Any]:
    """The next events by name; of several with one name, the last."""
    text = await asyncio.wait_for(anext(events), 10)
    found = [event.split("\n", 1) for event in text.strip().split("\n\n")]
    return {name.removeprefix("event: "): json.loads(data.removeprefix("data: ")) for name, data in found}


def test_the_stream_sends_new_steps_and_a_replaced_file(runs: Path) -> None:
    async def listen() -> None:
        store = RunStore(runs)
        run = store.find("a")
        assert run is not None
        events = _Watcher(store, lambda: False)._events([run])
        first = await _next(events)
        assert (first["points"]["curves"], first["runs"]["names"]) == (None, ["a", f"deep/{ODD}"])
        with (runs / "a" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "train/loss": 0.5}\n{"step": 7, "tra')
        assert (await _next(events))["points"]["curves"] == {"train/loss": {"steps": [6], "values": [0.5]}}
        (runs / "a" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\n')
        while "points" not in (found := await _next(events)):
            pass
        assert found["points"]["curves"] is None
        shutil.rmtree(runs / "a")
        while "runs" not in (found := await _next(events)) or len(found["runs"]["names"]) > 1:
            pass
        await events.aclose()

    asyncio.run(listen())


def test_a_stream_ends_with_the_server(runs: Path) -> None:
    async def listen() -> list[str]:
        return [event async for event in _Watcher(RunStore(runs), lambda: True)._events([])]

    assert asyncio.run(listen()) == []


def test_a_stream_more_than_there_may_be_ends_the_oldest(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise open streams take all connections, and nobody else is answered."""
    monkeypatch.setattr("ds_finetune.runs.watch.app.MOST_STREAMS", 2)

    async def listen() -> None:
        watcher = _Watcher(RunStore(runs), lambda: False)
        streams = [watcher._events([]) for _ in range(3)]
        for stream in streams:
            assert "runs" in await _next(stream)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(streams[0]), 10)
        (runs / "new").mkdir()
        (runs / "new" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\n')
        assert [("runs" in await _next(stream)) for stream in streams[1:]] == [True, True]
        for stream in streams:
            await stream.aclose()

    asyncio.run(listen())


def test_the_page_loads_only_files_that_are_installed(runs: Path) -> None:
    page = (STATIC / "index.html").read_text()
    for address in re.findall(r'(?:src|href)="(/[^"]*)"', page):
        assert _client(runs).get(address).status_code == 200, address
    assert _client(runs).get("/static/bokeh.min.js").content == bokehjs().read_bytes()
    for path in (*STATIC.iterdir(), PLOTS):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text, path
        assert "innerHTML" not in text.replace("without innerHTML", ""), path


def test_watch_starts_without_torch() -> None:
    code = "import sys, ds_finetune.cli.main, ds_finetune.runs.watch.app; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_cannot_be_watched_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--host", "203.0.113.7", "--port", "0"]) == 2
    assert "cannot listen on 203.0.113.7 port 0" in capsys.readouterr().err
