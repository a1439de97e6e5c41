"""The GPU programme, rehearsed on tiny models: every part ends, and an error of one is a result and stops no other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.table import tables
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu import supervise
from bench.gpu.__main__ import main
from bench.gpu.comparisons import VARIANTS
from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B, QWEN2_7B
from bench.gpu.results import Recorder, ResultFile, SkippedError, check_limit
from bench.gpu.slices import SLICES, Part, Slice
from bench.gpu.supervise import note_end, run_part, run_slice
from bench.gpu.throughput import THROUGHPUT, layers_that_fit, state_on_host
from bench.gpu.training import BY_DOCUMENT, TrainingRun, flops_per_token
from ds_finetune.api import plan_run
from ds_finetune.config.units import GIB
from ds_finetune.plan.model_shape import Shape
from tests.conftest import ROOT
from tests.running import start

BEHIND_SLOW = ("tests", "selftest", "variants")
"""Parts that take longer than the default suite bears."""


def _records(out: Path, name: str) -> list[dict[str, Any]]:
    return ResultFile(out / f"{name}.json").read()["records"]  # type: ignore[no-any-return]


def test_slices_fit_into_ten_minutes_each_and_fifty_in_all() -> None:
    assert all(one.seconds < 600 for one in SLICES.values())
    assert sum(one.seconds for one in SLICES.values()) <= 50 * 60
    assert all(part.seconds <= SLICES[name].seconds for name, one in SLICES.items() for part in one.parts)
    names = [part.name for one in SLICES.values() for part in one.parts]
    assert len(set(names)) == len(names)


def test_correctness_comes_first_and_has_time_for_all_its_parts() -> None:
    first = next(iter(SLICES))
    assert (first, SLICES[first].parts[0].name) == ("correctness", "selftest")
    for name in ("correctness", "comparisons"):
        assert sum(part.seconds for part in SLICES[name].parts) <= SLICES[name].seconds - 20


def test_shapes_are_those_of_the_models_that_they_are_named_after() -> None:
    billions = {name: Shape.of(dict(config)).total_params / 1e9 for name, config in (("1", QWEN2_1B), ("7", QWEN2_7B))}
    assert billions == {"1": pytest.approx(1.777, abs=1e-3), "7": pytest.approx(7.616, abs=1e-3)}
    experts = Shape.of(dict(DEEPSEEK_V2_LITE))
    assert experts.total_params / 1e9 == pytest.approx(15.706, abs=1e-3)


def test_every_run_of_real_size_is_planned_for_a_gpu(tmp_path: Path) -> None:
    """Those with adapters would write their base first; their rehearsal shows that they run."""
    runs = {variant.name: variant.run for variant in VARIANTS} | THROUGHPUT
    for number, (name, run) in enumerate(runs.items()):
        if "lora" in (run.sections or {}):
            continue
        planned = plan_run(run.config(tmp_path / str(number)), gpus=1)
        assert planned.estimate.gpu_bytes < 70 * GIB, name
        assert dict(planned.lines)["attention"].startswith("a call for each") == (
            run.precision == "fp32" or run.model_section == BY_DOCUMENT
        ), name


def test_the_offloaded_model_fits_into_pinned_blocks_of_powers_of_two() -> None:
    """Up to 2**32 parameters a block of four bytes each takes 16 GiB; one more parameter, and it takes 32."""
    assert state_on_host(2**32) == (16 + 16 + 8 + 11 * 4) * GIB
    assert state_on_host(2**32 + 1) > (32 + 32 + 16 + 11 * 4) * GIB
    assert layers_that_fit(128 * GIB, 80 * GIB) == 13
    assert layers_that_fit(1024 * GIB, 80 * GIB) == 28
    assert layers_that_fit(1024 * GIB, 8 * GIB) == 10


def test_adapters_need_four_flops_for_a_frozen_weight() -> None:
    run = TrainingRun(QWEN2_1B, 4096, is_one_document=True)
    adapted = TrainingRun(QWEN2_1B, 4096, is_one_document=True, sections={"lora": {"rank": 8}})
    shape = Shape.of(dict(QWEN2_1B))
    attention = shape.flops_per_token(4096) - shape.flops_per_token(4096, mean_attended=0)
    assert flops_per_token(run) == pytest.approx(shape.flops_per_token(4096))
    assert flops_per_token(adapted) - attention == pytest.approx((flops_per_token(run) - attention) * 4 / 6)


def _fail(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    with recorder.record("too large") as values:
        check_limit(values, "difference", 2.0, limit=1.0)
    with recorder.record("not a number") as values:
        check_limit(values, "difference", float("nan"), limit=1.0)
    with recorder.record("not here") as values:
        raise SkippedError("no GPU")
    with recorder.record("good") as values:
        values["ms"] = 1.23456


def test_errors_are_results_and_others_follow(tmp_path: Path) -> None:
    run_part("kernels", Part("p", _fail, 1), tmp_path, size="tiny")
    found = {record["name"]: record for record in _records(tmp_path, "kernels")}
    assert {name: record["result"] for name, record in found.items()} == {
        "too large": "failed",
        "not a number": "failed",
        "not here": "skipped",
        "good": "ok",
    }
    assert found["too large"]["error"].startswith("LimitExceededError: difference is 2, above its limit 1 (")
    assert found["not here"]["reason"] == "no GPU"
    assert found["good"]["values"] == {"ms": 1.235}
    run_part("kernels", Part("p", _fail, 1), tmp_path, size="tiny")
    assert len(_records(tmp_path, "kernels")) == 4, "a part that is repeated replaces its records"
    text = tables(tmp_path, list(SLICES))
    assert "| good | 1.24 |" in text or "| good | 1.23 |" in text
    assert "- 1 skipped, of p: no GPU" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_part_that_dies_or_hangs_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is that of what it was doing."""
    ended: list[Any] = []

    def popen(command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        name = command[command.index("--part") + 1]
        ResultFile(tmp_path / "kernels.json").update(running={"part": name, "name": f"{name}'s record"})
        programs = {
            "dies": f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})",
            "hangs": "import time; time.sleep(60)",
        }
        ended.append(real([sys.executable, "-c", programs.get(name, "raise SystemExit(3)")], start_new_session=True))
        return ended[-1]  # type: ignore[no-any-return]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    parts = (Part("dies", _fail, 30), Part("hangs", _fail, 1), Part("last", _fail, 30))
    monkeypatch.setitem(SLICES, "kernels", Slice(100, parts))
    assert not run_slice("kernels", tmp_path, size="tiny")
    errors = {record["name"]: record["error"] for record in _records(tmp_path, "kernels")}
    assert errors == {
        "dies's record": "the process was ended by SIGKILL",
        "hangs's record": "ended after its 1 s",
        "last's record": "the process ended with code 3",
    }
    assert all(one.poll() is not None for one in ended)


def test_a_slice_without_time_names_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLICES, "kernels", Slice(0, (Part("late", _fail, 30),)))
    assert not run_slice("kernels", tmp_path, size="tiny")
    assert [(record["name"], record["reason"]) for record in _records(tmp_path, "kernels")] == [
        ("late", "the 0 s of the slice were used up")
    ]


@pytest.mark.parametrize(("size", "succeeds"), [("tiny", True), ("full", False)])
def test_what_is_skipped_fails_a_slice_of_full_size(
    size: str, succeeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal may skip what needs a GPU."""

    def skip(*_: Any, **__: Any) -> str:
        with Recorder(ResultFile(tmp_path / "kernels.json"), "p").record("not here"):
            raise SkippedError("liger-kernel is not installed")

    monkeypatch.setattr(supervise, "_run_process", lambda *_, **__: skip() or "")
    monkeypatch.setitem(SLICES, "kernels", Slice(100, (Part("p", _fail, 30),)))
    assert run_slice("kernels", tmp_path, size=size) == succeeds
    if not succeeds:
        monkeypatch.setattr("bench.gpu.__main__.device", lambda: torch.device("cuda"))
        assert main(["kernels", "--out", str(tmp_path)]) == 1


def test_full_size_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--out", str(tmp_path)]) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err


def test_the_constraints_name_every_wheel_to_carry() -> None:
    """What this program and the tests of kernels need, and torch does not bring; DeepSpeed has only a source archive."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    named = {canonicalize_name(line.split("==")[0]) for line in lines if line and line[0] != "#"}
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*own["dependencies"], *own["optional-dependencies"]["gpu"], "bitsandbytes", "peft", "pytest"]
    missing = _needed(wanted) - _needed(["torch"]) - named
    assert not {name for name in missing if not name.startswith(("nvidia-", "triton", "cuda-"))}


def _needed(requirements: Sequence[str]) -> set[str]:
    """Names of packages with what they need in turn, as far as they are installed."""
    found: set[tuple[str, str]] = set()
    following = [Requirement(text) for text in requirements]
    while following:
        one = following.pop()
        for extra in ("", *one.extras):
            key = canonicalize_name(one.name), extra
            if key in found:
                continue
            found.add(key)
            with contextlib.suppress(PackageNotFoundError):
                needs = map(Requirement, requires(one.name) or [])
                following += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def test_a_part_that_ends_well_leaves_nothing_to_say(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.json")
    note_end(file, "p", "")
    assert file.read()["records"] == []


def _rehearse(name: str, part: str, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.gpu", name, "--part", part, "--size", "tiny", "--out", str(out)]
    done = start(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return _records(out, name)


def _assert_no_failure(records: list[dict[str, Any]]) -> None:
    assert records
    assert [record for record in records if record["result"] == "failed"] == []


@pytest.mark.parametrize(
    ("name", "part"), [("kernels", "latent-attention"), ("kernels", "head"), ("experts", "lora-16b")]
)
def test_parts_run_to_their_end(name: str, part: str, tmp_path: Path) -> None:
    records = _rehearse(name, part, tmp_path)
    _assert_no_failure(records)
    assert any(record["result"] == "ok" for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_every_slice_runs_to_its_end(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command of a user, but in forks of one process where that is enough."""
    for part in SLICES[name].parts:
        _assert_no_failure(_rehearse(name, part.name, tmp_path))
    assert main(["table", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"### {name}\n")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.slow
def test_the_script_runs_a_slice(tmp_path: Path) -> None:
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "SIZE": "tiny"}
    command = ["bash", "scripts/gpu_check.sh", "experts", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _assert_no_failure(json.loads((tmp_path / "experts.json").read_text())["records"])
