"""A profiled run of two ranks: the trace, the summary, and the steps outside the range."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoConfig

from ds_finetune.config.schema import read_config
from ds_finetune.errors import ConfigError
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.settings import RunSettings
from ds_finetune.runs.timeline.profiler import HostClock, StepProfiler
from ds_finetune.runs.timeline.profiler import ProfiledRun as RunFacts
from tests.checking import check, settings_of
from tests.running import metrics, start, tiny_task, torchrun

SLOW_SECONDS, SHIFT_SECONDS = 1.0, 3.0
WORKER = "tests/trainer/profile_worker.py"
ROUNDING = 0.0015
"""Microseconds: a slice's begin and length are rounded to a thousandth each."""
Event = dict[str, Any]


class ProfiledRun(NamedTuple):
    folder: Path
    printed: str
    summary: dict[str, Any]
    events: list[Event]

    def slices(self, rank: int, *names: str) -> list[Event]:
        """Slices of a rank with one of `names`, or all, by time."""
        found = [e for e in self.events if e["ph"] == "X" and e["pid"] == rank and (not names or e["name"] in names)]
        return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def _read(folder: Path, printed: str) -> ProfiledRun:
    profile = folder / "run" / "profile"
    with gzip.open(profile / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return ProfiledRun(folder, printed, json.loads((profile / "summary.json").read_text()), events)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ProfiledRun:
    """Steps 2 and 3 of five under ZeRO-1, where rank 1 gets its data late and has a clock that is ahead."""
    folder = tmp_path_factory.mktemp("profiled")
    run_file = tiny_task(
        folder,
        train={"for": "5 steps"},
        deepspeed={"zero_optimization": {"stage": 1}},
        profile={"steps": "2-3"},
        checkpoint={"every": "3 steps"},
        eval={"every": "3 steps"},
        export={"at_end": False},
    )
    done = start(torchrun(WORKER, "1", str(SLOW_SECONDS), str(SHIFT_SECONDS), str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "USDT" not in done.stderr
    return _read(folder, done.stdout)


def test_slices_are_complete_and_nest(run: ProfiledRun) -> None:
    tracks = defaultdict(list)
    for event in run.events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    assert {pid for pid, _ in tracks} == {0, 1}
    names = {event["pid"]: event["args"]["name"] for event in run.events if event["name"] == "process_name"}
    assert [names[rank].split(" (")[0] for rank in (0, 1)] == ["rank 0", "rank 1"]
    for track, slices in tracks.items():
        ends: list[float] = []
        for begin, negative in sorted(slices):
            while ends and ends[-1] <= begin + ROUNDING:
                ends.pop()
            assert not ends or begin - negative <= ends[-1] + ROUNDING, track
            ends.append(begin - negative)


def test_each_profiled_step_has_its_phases(run: ProfiledRun) -> None:
    for rank in (0, 1):
        steps = run.slices(rank, "step 2", "step 3")
        assert [event["name"] for event in steps] == ["step 2", "step 3"]
        for step, evaluates in zip(steps, (False, True), strict=True):
            inside = [e["name"] for e in run.slices(rank) if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
            assert [inside.count(name) for name in ("data", "backward", "step")] == [1, 2, 1]
            assert inside.count("forward") == 2 or evaluates
            assert {"optimizer", "checkpoint", "aten::mm"} <= set(inside)
            assert inside.count("evaluation") == evaluates
    assert run.summary["steps"] == [2, 3]


def _inside(run: ProfiledRun, phase: str, name: str, rank: int = 0) -> list[Event]:
    """Slices of a rank that begin in a phase."""
    phases = [(event["ts"], event["ts"] + event["dur"]) for event in run.slices(rank, phase)]
    return [e for e in run.slices(rank, name) if any(begin <= e["ts"] < end for begin, end in phases)]


def test_bytes_of_collectives_are_those_of_the_model(run: ProfiledRun) -> None:
    # ZeRO-1 reduces all gradients once, in fp32; each rank updates its half of the weights and sends it to the other.
    model = build_meta_model(AutoConfig.from_pretrained(run.folder / "model"))
    num_bytes = 4 * sum(param.numel() for param in model.parameters())

    def of(kind: str, phase: str) -> list[int]:
        """Bytes of the collectives of a kind that rank 0 called in a phase."""
        return list({e["args"]["number"]: e["args"]["bytes"] for e in _inside(run, phase, kind)}.values())

    assert of("all_reduce", "backward") == [num_bytes] * 2
    assert sum(of("all_gather", "optimizer")) == num_bytes / 2 * 2


def test_the_rank_that_is_not_slow_waits(run: ProfiledRun) -> None:
    fast, slow = ([step["categories"] for step in rank["steps"]] for rank in run.summary["ranks"])
    for waits, is_late in zip(fast, slow, strict=True):
        assert waits["waiting"] > 0.7 * SLOW_SECONDS
        assert is_late["data"] > 0.5 * SLOW_SECONDS > 2 * waits["data"]
    # The first collective of a step is the reduction of gradients.
    waited = [[e["args"].get("waited_us", 0) / 1e6 for e in _inside(run, "backward", "all_reduce", r)] for r in (0, 1)]
    assert sum(waited[0]) > 2 * 0.7 * SLOW_SECONDS > 4 * sum(waited[1])
    longest = max(run.slices(0, "all_reduce"), key=lambda event: event["args"].get("waited_us", 0))
    assert longest["args"]["last_rank"] == 1


def test_times_add_up_to_the_step(run: ProfiledRun) -> None:
    recorded = {record["step"]: record["perf/step_seconds"] for record in metrics(run.folder)}
    for number in (2, 3):
        ((step,), (trained,)) = run.slices(0, f"step {number}"), _inside(run, f"step {number}", "step")
        assert trained["ts"] + trained["dur"] - step["ts"] == pytest.approx(1e6 * recorded[number], rel=0.02, abs=5e4)
    for rank in run.summary["ranks"]:
        for step in rank["steps"]:
            assert sum(step["categories"].values()) == pytest.approx(step["seconds"])
    lines = run.printed.splitlines()
    head = next(line for line in lines if line.startswith("seconds of a step"))
    assert head.split()[-8:] == ["all", *run.summary["categories"]]
    for rank in run.summary["ranks"]:
        row = next(line.split() for line in lines if line.startswith(f"rank {rank['rank']} "))
        assert float(row[2]) == pytest.approx(rank["mean"]["seconds"], abs=1e-4)


def test_clocks_are_aligned(run: ProfiledRun) -> None:
    first, second = (rank["clock"] for rank in run.summary["ranks"])
    assert first == {"offset_seconds": 0, "uncertainty_seconds": 0}
    assert second["offset_seconds"] == pytest.approx(-SHIFT_SECONDS, abs=second["uncertainty_seconds"] + 0.001)
    spans: list[dict[tuple[str, int], tuple[float, float]]] = [{}, {}]
    for rank, of_rank in enumerate(spans):
        for event in (e for e in run.slices(rank) if "number" in e.get("args", {})):
            key = event["args"]["group"], event["args"]["number"]
            begin = of_rank.get(key, (event["ts"], 0))[0]
            # From the call to the end of the wait for it.
            of_rank[key] = begin, event["ts"] + event["dur"]
    assert spans[0].keys() == spans[1].keys()
    for key, (begin, end) in spans[0].items():
        # No rank is done with an all-reduce or all-gather before the other has begun it.
        assert end > spans[1][key][0] - 1000
        assert spans[1][key][1] > begin - 1000


def test_nothing_is_wrapped_outside_the_range(run: ProfiledRun) -> None:
    for rank in (0, 1):
        lines = map(json.loads, (run.folder / f"wrapped-{rank}.jsonl").read_text().splitlines())
        wrapped = {line["step"]: line["wrapped"] for line in lines}
        inside = ["step", "_forward", "evaluate", "backward", "allreduce", "profiler"]
        assert wrapped == {1: [], 2: inside, 3: inside, 4: [], 5: []}
    assert run.printed.count("profiled steps 2 to 3: open ") == 1


def _lose_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(tempfile, "tempdir", str(folder / "gone"))


def _cut_trace(patch: pytest.MonkeyPatch, _: Path) -> None:
    """As Kineto leaves its file on a disk that is full."""
    patch.setattr(torch.profiler.profile, "export_chrome_trace", lambda _, path: Path(path).write_text('{"traceEv'))


@pytest.mark.parametrize(("damage", "error"), [(_lose_folder, "FileNotFoundError"), (_cut_trace, "JSONDecodeError")])
def test_a_trace_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch, Path], None], error: str
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said: list[str] = []
    try:
        about = RunFacts("cpu", "dp 1", 1, (0,))
        profiler = StepProfiler(about, dist.HashStore(), clock=HostClock(), wrap=lambda _: nullcontext())
        profiler.start()
        profiler.begin_step(7)
        profiler.steps.append(7)
        damage(monkeypatch, tmp_path)
        profiler.finish(tmp_path / "profile", said.append)
    finally:
        dist.destroy_process_group()
    (line,) = said
    assert line.startswith(f"the profile of step 7 was not written: its trace cannot be read on rank 0: {error}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_resumed_run_profiles_what_is_left(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path, train={"for": "6 steps"}, checkpoint={"every": "2 steps"}, export={"at_end": False})

    def train(*overrides: str, ranks: int = 1) -> str:
        done = start(torchrun("ds_finetune/train.py", str(run_file), *overrides, ranks=ranks))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "profiled step 2: " in train("train.for=2 steps", "profile.steps=2")
    assert "profiled steps 3 to 4: " in train("train.for=4 steps", "profile.steps=2-4", "profile.ranks=1", ranks=2)
    partial = _read(tmp_path, "")
    assert (partial.summary["profiled_ranks"], partial.summary["knows_waiting"]) == ([1], False)
    assert {event["pid"] for event in partial.events if event["ph"] == "X"} == {1}
    assert partial.summary["mean"]["categories"]["waiting"] == 0
    assert "profile.steps 1-4: not profiled again, since 4 steps are done" in train("profile.steps=1-4")
    assert _read(tmp_path, "").summary == partial.summary


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ({"steps": "12-10"}, "ends at step 10 and begins at step 12; write `10-12`"),
        ({"steps": "0-2"}, "begins at step 0, and steps count from 1"),
        ({"steps": ""}, "is not a range of steps; write `10-12`"),
        ({"steps": "all"}, "is not a range of steps"),
        ({"steps": 2.5}, "`2.5` is not a range of steps"),
        ({"steps": 2, "ranks": "first"}, "it should be `all`, a rank such as 0, or a list of ranks"),
        ({"steps": 2, "ranks": -1}, "it should be `all`, a rank such as 0, or a list of ranks"),
        ({"ranks": 0}, "`profile.steps` is missing"),
    ],
)
def test_wrong_ranges_and_ranks_are_refused(tmp_path: Path, profile: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match="profile") as refused:
        read_config(_run_file(tmp_path, profile))
    assert text in str(refused.value)


def test_ranges_beyond_the_run_and_unknown_ranks_are_refused(tmp_path: Path) -> None:
    config = read_config(_run_file(tmp_path, {"steps": "10-12", "ranks": [0, 5]}))
    assert config.profile is not None
    assert config.profile.first_and_last == (10, 12)
    with pytest.raises(ConfigError, match="`10-12` ends at step 12, and the run has 11 steps"):
        check(settings_of(config, steps=11, warmup=1), "length of the run")
    with pytest.raises(ConfigError, match=r"profile.ranks names 5, and the run has 2 ranks, from 0 to 1"):
        check(RunSettings.of(config, mesh=Mesh(0, 2)), "ranks")
    check(settings_of(config, steps=12, warmup=1), "length of the run")
    check(RunSettings.of(config, mesh=Mesh(0, 6)), "ranks")


def _run_file(folder: Path, profile: dict[str, Any]) -> Path:
    tree = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "profile": profile}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
