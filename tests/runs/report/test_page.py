"""The page of a report: its content, what it refers to, its size, and bad run folders."""

import base64
import hashlib
import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.cli.main import main
from ds_finetune.errors import OutputError
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.page import TEMPLATES, render_page
from ds_finetune.runs.report.sections import overlay_page, run_page
from ds_finetune.runs.report.write import try_run_report, write_report, write_run_report
from ds_finetune.trainer.run_records import report_failure
from tests.runs.report.made_runs import CONFIG, HOSTILE, make_run, metric_lines

MOST_BYTES = 3_000_000
VOID = {"meta", "link", "br", "img", "input", "hr"}


class PageParser(HTMLParser):
    """The texts of a page by the headings of its sections, and what it has of tags and addresses."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.marked: list[str] = []
        self._open: list[str] = []
        self._heading = "top"
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "srcset")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        if tag == "h2":
            self._heading = dict(attributes)["id"] or ""
            self.sections[self._heading] = ""
        if tag == "script":
            self.scripts.append("")
        if tag == "mark":
            self.marked.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += text
            return
        if self._open and self._open[-1] == "mark":
            self.marked[-1] += text
        self.sections[self._heading] = self.sections.get(self._heading, "") + text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run-a")


@pytest.fixture(scope="module")
def page(run: Path) -> PageParser:
    return PageParser(write_run_report(run).read_text())


def test_a_report_has_each_part_of_the_run(page: PageParser) -> None:
    parts = {
        "curves": "loss grad_norm perf/mfu",
        "plan": "dp 2, ZeRO-1 a note",
        "events": "node1 w of layer 3 on rank 1 2.0x the median",
        "experts": "layer 2 8.00",
        "data": "600 rows rows read",
        "answers": "answer at 10 answer at 60",
        "export": "export: verified 47 tensors tensor x differs",
        "repeat": "2.13.0 python train.py a.yaml global_batch_size: 8",
    }
    assert list(page.sections) == ["top", *parts]
    for name, words in parts.items():
        missing = [word for word in words.split() if word not in page.sections[name]]
        assert not missing, name
    assert "best eval/loss" in page.sections["top"]


def test_trained_tokens_are_marked_and_texts_of_the_data_stay_texts(page: PageParser) -> None:
    assert page.marked == [f"the answer {HOSTILE}"]
    assert "img" not in page.tags
    assert "the question" in page.sections["data"]


def test_the_page_fetches_nothing_and_runs_its_own_scripts_alone(run: Path, page: PageParser) -> None:
    assert [address for address in page.addresses if not address.startswith(("#", "data:,"))] == []
    assert page.handlers == []
    html = (run / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    hashes = re.findall(r"'sha256-([^']+)'", policy[1])
    own = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert own == hashes
    assert "default-src 'none'; base-uri 'none'; form-action 'none';" in policy[1]
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face", style)


def test_the_curves_have_the_numbers_of_the_run_and_restarts(page: PageParser) -> None:
    charts = _charts(page)
    loss = charts[0]["lines"]
    names = [line["name"] for line in loss]
    assert names == ["train/loss", "train/loss", "eval/loss", "eval/math/loss"]
    assert [line["role"] for line in loss] == ["faint", "mean", "points", "points"]
    assert (loss[0]["x"][0], loss[0]["y"][0]) == (1, 6.0)
    assert (loss[2]["x"][:2], loss[2]["y"][:2]) == ([10, 20], [2.65, 2.45])
    assert charts[0]["markers"] == [20], "the step of the restart"
    norms = next(chart for chart in charts if chart["title"] == "grad_norm")
    assert norms["lines"][0]["y"][4] is None, "a step without a finite value is a gap"


def _charts(page: PageParser) -> list[dict[str, Any]]:
    return json.loads(page.scripts[0])


def test_the_smoothed_loss_does_not_lag_behind_the_loss(page: PageParser) -> None:
    train, smoothed = _charts(page)[0]["lines"][:2]
    assert smoothed["x"][-1] == train["x"][-1]
    assert smoothed["y"][29] == pytest.approx(train["y"][29], rel=1e-3)


@pytest.mark.parametrize(
    ("metrics", "titles"),
    [
        (("train/reward_accuracy", "train/reward_margin"), ["reward_accuracy", "reward_margin", "loss"]),
        (("rollout/answer_tokens_max", "rollout/answer_tokens", "rollout/reward"), ["reward", "answer_tokens", "loss"]),
    ],
)
def test_curves_of_the_objective_come_first(tmp_path: Path, metrics: tuple[str, ...], titles: list[str]) -> None:
    run = make_run(tmp_path / "run")
    records = [json.loads(line) | dict.fromkeys(metrics, 0.5) for line in metric_lines(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = run_page(RunFolder.read(run))
    assert [chart.title for chart in page.charts][:3] == titles
    labels = [tile.label for tile in page.tiles]
    assert set(metrics) - {"rollout/answer_tokens_max"} <= set(labels)


def test_words_on_coloured_ground_can_be_read() -> None:
    """Badges and messages have the contrast of 4.5 that WCAG 2.1 (1.4.3) asks for, in each theme."""
    style = (TEMPLATES / "page.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    themes = [{name: light for name, light, _ in pairs}, {name: dark for name, _, dark in pairs}]
    low = {
        (word, number): ratio
        for number, theme in enumerate(themes)
        for word, ground in (("good", "good-back"), ("bad", "bad-back"), ("mark-text", "mark"))
        if (ratio := _contrast(theme[word], theme[ground])) < 4.5
    }
    assert not low


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_collectives_share_two_charts_and_units_stay_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    names = ("comm/all_gather_mib", "comm/total_mib", "comm/total_share", "train/mismatch", "router/mismatch")
    names += ("rollout/part/number", "rollout/scored/number", "router/max_violation_mean", "router/max_violation_max")
    records = [json.loads(line) | dict.fromkeys(names, 0.5) for line in metric_lines(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = {chart.title: [line.name for line in chart.lines] for chart in run_page(RunFolder.read(run)).charts}
    assert lines["comm/*_mib"] == ["comm/all_gather_mib", "comm/total_mib"]
    assert lines["comm/*_share"] == ["comm/total_share"]
    assert lines["router/max_violation"] == ["router/max_violation_mean", "router/max_violation_max"]
    for title in ("mismatch", "router/mismatch", "rollout/part", "rollout/scored"):
        assert len(lines[title]) == 1, title


def test_the_busiest_experts_are_named(page: PageParser, tmp_path: Path) -> None:
    rows = " ".join(page.sections["experts"].split())
    assert "first tenth of the steps0 of layer 11.000 of 24" in rows
    assert "last tenth of the steps5 of layer 28.007 of 24" in rows
    run = make_run(tmp_path / "run")
    idle = {"step": 1, "num_tokens": 0, "layers": [1], "entropy": [0.0], "counts": [[0] * 4]}
    (run / "experts.jsonl").write_text(json.dumps(idle) + "\n")
    assert "4 of 4" in PageParser(render_page(run_page(RunFolder.read(run)))).sections["experts"]


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path: Path, steps: int) -> None:
    run = make_run(tmp_path / "long")
    lines = metric_lines(steps, every=steps // 100)
    lines[4_321] = lines[4_321].replace('"train/grad_norm": 1.5', '"train/grad_norm": 99.5')
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    html = render_page(run_page(RunFolder.read(run)))
    assert len(html.encode()) < MOST_BYTES
    norm = next(chart for chart in _charts(PageParser(html)) if chart["title"] == "grad_norm")["lines"][0]
    assert dict(zip(norm["x"], norm["y"], strict=True))[4322] == 99.5


def test_long_texts_and_many_curves_are_shortened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    sample = {"step": 10, "name": "eval", "answer": "a", "expected": "e" * 100_000}
    samples = [sample | {"prompt": f"{number} " + "p" * 100_000} for number in range(12)]
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "# " + "c" * 2_000_000)
    records = [{"step": step} | {f"train/m{n}": step / 7 + n for n in range(20)} for step in range(1, 601)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(render_page(run_page(RunFolder.read(run))).encode()) < MOST_BYTES
    runs = [RunFolder.read(run)] * 12
    assert len(render_page(overlay_page(runs)).encode()) < MOST_BYTES


def test_files_that_cannot_be_read_leave_out_their_section_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "experts.jsonl").write_text((run / "experts.jsonl").read_text().replace("[1, 2, 3]", '[1, 2, "b"]'))
    page = PageParser(render_page(run_page(RunFolder.read(run))))
    assert "experts" not in page.sections
    assert "curves" in page.sections
    told = "the section Load of experts is left out: this version cannot read its files (ValueError"
    assert told in page.sections["top"]


def test_a_damaged_line_hides_no_other_line_and_an_empty_file_is_no_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "ranks.jsonl").write_text('{"step": 1, "seconds": [0.1, 0.2]}\n')
    (run / "rollouts.jsonl").write_text('{"step": 1, "prompt": "2 + 3", "answers": []}\n')
    for name, keys in (
        ("samples.jsonl", '"prompt": "p", "answer": "a", "expected": "e"'),
        ("ranks.jsonl", '"rank": 0'),
        ("ranks.jsonl", '"seconds": [0.1, "a"]'),
        ("rollouts.jsonl", '"prompt": "p", "answers": [{}]'),
    ):
        with (run / name).open("a") as file:
            file.write(f'{{"step": 2, {keys}}}\n')
    (run / "experts.jsonl").write_text("")
    page, empty = run_page(RunFolder.read(run)), run_page(RunFolder.read(make_run(tmp_path / "other")))
    assert page.warnings == empty.warnings
    sections = PageParser(render_page(page)).sections
    assert {"answers", "ranks", "rollouts"} <= sections.keys()
    assert "experts" not in sections
    assert "answer at 60" in sections["answers"]


def test_times_of_many_ranks_are_three_lines_from_the_last_number_of_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    records = [{"step": 1, "seconds": [1.0, 2.0]}]
    records += [{"step": step, "seconds": [0.1 * (rank + 1) for rank in range(9)]} for step in (2, 3)]
    (run / "ranks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chart = next(chart for chart in run_page(RunFolder.read(run)).charts if "by rank" in chart.title)
    lines = {line.name: (list(line.x), list(line.y)) for line in chart.lines}  # type: ignore[call-overload,arg-type]
    assert lines["slowest rank"] == ([2, 3], [pytest.approx(0.9)] * 2)
    assert lines["median"] == ([2, 3], [0.5] * 2)


def test_sampled_answers_have_their_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    answer = {"text": "5", "reward": 1.5, "parts": {"number": 1.0, "format": None}, "advantage": 0.5, "finish": "stop"}
    (run / "rollouts.jsonl").write_text(json.dumps({"step": 1, "prompt": "2 + 3", "answers": [answer]}) + "\n{\n")
    text = PageParser(render_page(run_page(RunFolder.read(run)))).sections["rollouts"]
    for part in ("Before step 1", "2 + 3", "reward 1.5 (number 1.0, format None), advantage 0.5, stop"):
        assert part in text


def test_profiled_steps_are_tabulated_and_an_unknown_form_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    mean = {"seconds": 0.5, "categories": {"compute": 0.3, "waiting": 0.2}}
    summary = {"steps": [10, 11], "categories": ["compute", "waiting"], "ranks": [{"rank": 0, "mean": mean}]}
    summary |= {"mean": mean}
    (run / "profile").mkdir()
    (run / "profile" / "summary.json").write_text(json.dumps(summary))
    text = PageParser(render_page(run_page(RunFolder.read(run)))).sections["profile"]
    assert all(word in text for word in ("rank 0", "0.3000", "0.2000", "steps 10 to 11"))
    (run / "profile" / "summary.json").write_text('{"steps": []}')
    assert "the section Profiled steps is left out" in " ".join(run_page(RunFolder.read(run)).warnings)


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    """As in a folder of an earlier version, which has metrics and a configuration alone."""
    run = make_run(tmp_path / "old")
    for name in ("starts.jsonl", "data.json", "samples.jsonl", "exports.json", "experts.jsonl", "plan.json"):
        (run / name).unlink()
    page = PageParser(render_page(run_page(RunFolder.read(run))))
    assert list(page.sections) == ["top", "curves", "events", "export", "repeat"]
    assert "optim:" in page.sections["repeat"]


def test_a_folder_that_is_being_written_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = metric_lines(3)
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:40])
    (run / "samples.jsonl").write_text('{"step": 10, "na')
    (run / "starts.jsonl").write_text((run / "starts.jsonl").read_text()[:-60])
    with (run / "experts.jsonl").open("a") as file:
        file.write('{"step": 41, "lay')
    page = PageParser(render_page(run_page(RunFolder.read(run))))
    assert re.search(r"steps\s*3of 60", page.sections["top"])
    assert "answers" not in page.sections


def test_damaged_lines_and_another_version_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("\n".join(["damaged", *metric_lines(3)]) + "\n")
    start = json.loads((run / "starts.jsonl").read_text().splitlines()[0])
    (run / "starts.jsonl").write_text(json.dumps(start | {"versions": {"ds_finetune": "9.9"}, "unknown": [1]}) + "\n")
    top = PageParser(render_page(run_page(RunFolder.read(run)))).sections["top"]
    assert "lines of metrics.jsonl are no records of a step" in top
    assert "written by ds_finetune 9.9" in top


def test_files_of_another_form_are_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-\udcff")
    start = json.loads((run / "starts.jsonl").read_text().splitlines()[0])
    start |= {"ranks": None, "after_step": None, "steps": "1 epoch", "time": 1e30}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    (run / "data.json").write_text(json.dumps({"samples": [{"source": "a"}], "counts": {"rows": 1}}))
    sample = {"step": 10, "name": "eval", "prompt": "half a pair: \ud800", "answer": "a", "expected": "b"}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = PageParser(write_run_report(run).read_text())
    assert list(page.sections) == ["top", "curves", "plan", "experts", "answers", "export", "repeat"]
    for text in (
        "ranks is None",
        "steps is '1 epoch'",
        "the section Data is left out",
        "the section Starts, skipped steps and stragglers is left",
    ):
        assert text in page.sections["top"], text
    assert "half a pair: \\ud800" in page.sections["answers"]
    assert not list(run.glob(".report*"))
    assert write_report([run, run], tmp_path / "both.html").exists()


def test_what_is_no_run_is_refused_and_other_files_stay(
    tmp_path: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "r.html")]) == 2
    assert "holds no run" in capfd.readouterr().err
    assert not (tmp_path / "r.html").exists()
    kept = tmp_path / "mine.html"
    kept.write_text("<p>mine</p>")
    assert main(["report", str(run), "-o", str(kept)]) == 2
    assert kept.read_text() == "<p>mine</p>"
    assert main(["report", str(run), str(run)]) == 2
    assert "-o FILE" in capfd.readouterr().err
    with pytest.raises(OutputError, match=r"cannot be written"):
        write_report([run], tmp_path / "nowhere" / "r.html")


def test_a_report_that_fails_is_one_line_with_its_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my run")
    (run / "report.html").write_text("mine")
    said: list[str] = []
    assert try_run_report(run, said.append, state="finished") is None
    (line,) = said
    assert line.startswith("REPORT NOT WRITTEN: ")
    assert "which is not a report" in line
    assert f"ds-finetune report '{run}'" in line
    assert (run / "report.html").read_text() == "mine"


def test_a_run_that_fails_gets_its_report_and_the_run_of_another_process_keeps_its_own(tmp_path: Path) -> None:
    run, said = make_run(tmp_path / "run"), list[str]()
    with pytest.raises(RuntimeError, match="boom"), report_failure(run, said.append):
        raise RuntimeError("boom")
    assert not (run / "report.html").exists(), "the last start in the folder is another process"
    start = {"host": socket.gethostname(), "pid": os.getpid()}
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")
    with pytest.raises(RuntimeError, match="boom"), report_failure(run, said.append):
        raise RuntimeError("boom")
    assert re.search(r'class="state bad">failed<', (run / "report.html").read_text())
    assert said == []


def test_runs_are_overlaid_with_the_differences_of_their_configuration(tmp_path: Path) -> None:
    optim: dict[str, Any] = CONFIG["optim"]
    runs = [
        make_run(tmp_path / "x" / "run"),
        make_run(tmp_path / "y" / "run", steps=40, optim=optim | {"lr": 0.002}, output_dir="runs/b", lora={"rank": 8}),
    ]
    out = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    html = out.read_text()
    page = PageParser(html)
    assert list(page.sections) == ["top", "results", "differences", "curves"]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html)
    cells = {name: re.findall(r">([^<]*)</td>", row) for name, row in rows}
    assert cells["optim.lr"] == ["0.001", "0.002"]
    assert cells["lora.rank"] == ["-", "8"]
    assert "output_dir" not in cells
    assert "train.for" not in cells, "it is the same in both"
    assert cells["steps"] == ["60", "40"]
    loss = _charts(page)[0]["lines"]
    assert [line["name"] for line in loss] == ["x/run", "x/run", "y/run", "y/run"], "faint, and smoothed"
    assert {len(line["x"]) for line in loss} == {60, 40}
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0, "a report may be written again"
