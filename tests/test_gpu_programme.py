"""The GPU programme, rehearsed on tiny models: every part ends, and an error of one is a result and stops no other."""

import ast
import contextlib
import importlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu import checks, supervise
from bench.gpu.__main__ import main
from bench.gpu.comparisons import LOSSES, ORDERS
from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B, QWEN2_7B
from bench.gpu.results import Recorder, ResultFile, SkippedError, line_of
from bench.gpu.slices import SLICES, Part
from bench.gpu.supervise import run_part, run_slice
from bench.gpu.throughput import THROUGHPUT
from ds_finetune.api import plan_run
from ds_finetune.config.units import GIB
from ds_finetune.errors import RunError
from ds_finetune.plan.model_shape import Shape
from ds_finetune.reference.selftest import run as selftest_run
from ds_finetune.reference.selftest.compare import LayoutComparison
from tests.conftest import ROOT
from tests.described import described_tree
from tests.running import start


def _records(out: Path, name: str) -> list[dict[str, Any]]:
    return ResultFile(out / f"{name}.json").read()["records"]  # type: ignore[no-any-return]


def test_slices_fit_into_ten_minutes_and_those_of_correctness_into_fourteen() -> None:
    seconds = {name: sum(part.seconds for part in parts) for name, parts in SLICES.items()}
    assert all(each < 600 for each in seconds.values())
    assert sum(seconds[name] for name in ("kernels", "training", "memory")) <= 14 * 60
    names = [part.name for parts in SLICES.values() for part in parts]
    assert len(set(names)) == len(names)


def test_the_most_informative_parts_come_first() -> None:
    order = ["machine", "tests", "sizes", "choices", "selftest", "losses", "waits", "memory"]
    assert [part.name for parts in SLICES.values() for part in parts][: len(order)] == order


def test_shapes_are_those_of_the_models_that_they_are_named_after() -> None:
    billions = {
        name: Shape.of(described_tree(config)).total_params / 1e9 for name, config in (("1", QWEN2_1B), ("7", QWEN2_7B))
    }
    assert billions == {"1": pytest.approx(1.777, abs=1e-3), "7": pytest.approx(7.616, abs=1e-3)}
    experts = Shape.of(described_tree(DEEPSEEK_V2_LITE))
    assert experts.total_params / 1e9 == pytest.approx(15.706, abs=1e-3)


def test_every_run_of_real_size_is_planned_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with adapters would write their base first; their rehearsal shows that they run."""
    monkeypatch.setattr("ds_finetune.plan.kernels.find_spec", lambda _: "Triton, as on a machine with a GPU")
    runs = {variant.name: variant.run for variant in (*LOSSES, *ORDERS)} | THROUGHPUT
    for number, (name, run) in enumerate(runs.items()):
        if "lora" in (run.sections or {}):
            continue
        planned = plan_run(run.config(tmp_path / str(number)), gpus=1)
        assert planned.states.device_bytes < 70 * GIB, name


def _fail(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    with recorder.record("too large") as values:
        values.check("difference", 2.0, limit=1.0)
    with recorder.record("not a number") as values:
        values.check("difference", float("nan"), limit=1.0)
    with recorder.record("not here") as values:
        raise SkippedError("no GPU")
    with recorder.record("good") as values:
        values["ms"] = 1.23456
        values.check("difference", 0.5, limit=1.0)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    """A part whose records fail, are skipped and succeed."""
    monkeypatch.setattr(checks, "fail", _fail, raising=False)
    return Part("p", "checks.fail", 1)


def test_errors_are_results_and_others_follow(part: Part, tmp_path: Path) -> None:
    lines = io.StringIO()
    run_part("kernels", part, tmp_path, size="tiny", lines=lines)
    found = {record["name"]: record for record in _records(tmp_path, "kernels")}
    assert {name: record["result"] for name, record in found.items()} == {
        "too large": "failed",
        "not a number": "failed",
        "not here": "skipped",
        "good": "ok",
    }
    assert found["too large"]["error"].startswith("LimitExceededError: difference is 2, above its limit 1 (")
    assert found["not here"]["reason"] == "no GPU"
    assert found["good"]["values"] == {"ms": 1.235, "difference": 0.5}
    assert lines.getvalue().splitlines() == [line_of(record) for record in found.values()]
    assert line_of(found["good"] | {"seconds": 0.1}) == "ok      p: good: ms 1.24, difference 0.5 (limit 1) [0.1 s]"
    run_part("kernels", part, tmp_path, size="tiny", lines=lines)
    assert len(_records(tmp_path, "kernels")) == 4, "a part that is repeated replaces its records"


def test_a_record_is_written_and_printed_when_it_ends(part: Part, tmp_path: Path) -> None:
    """A part that hangs later has lost nothing."""
    seen: list[int] = []

    class Lines(io.StringIO):
        def flush(self) -> None:
            seen.append(len(_records(tmp_path, "kernels")))

    run_part("kernels", part, tmp_path, size="tiny", lines=Lines())
    assert seen[:4] == [1, 2, 3, 4]


def test_layouts_of_the_selftest_are_records_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def selftest(_: object, size: object, *, say: Callable[[str], None]) -> None:
        for number, verdict in enumerate(("equal", "WRONG")):
            selftest_run.compare_layout(number)
            say(f"{verdict}  {f'layout {number}':44} loss {number}")
            seen.append(len(_records(tmp_path, "x")))
        say("1 of 2 layouts equal a plain loop on 1 ranks (cpu), 2 s")
        raise RunError("1 of 2 layouts are off", hint="")

    seen: list[int] = []
    monkeypatch.setattr(selftest_run, "selftest", selftest)
    monkeypatch.setattr(
        selftest_run, "compare_layout", lambda number: LayoutComparison({"loss": number}, {"loss": 0.5})
    )
    checks.layouts(Recorder(ResultFile(tmp_path / "x.json"), "selftest", io.StringIO()), tmp_path, is_tiny=True)
    records = _records(tmp_path, "x")
    assert seen == [1, 2]
    assert [(each["name"], each["result"], each["values"], each["limits"]) for each in records] == [
        ("layout 0", "ok", {"loss": 0}, {"loss": 0.5}),
        ("layout 1", "failed", {"loss": 1}, {"loss": 0.5}),
        ("all layouts", "failed", {}, {}),
    ]


def test_a_part_that_dies_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error is that of what it was doing."""
    ended: list[Any] = []

    def popen(command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        name = command[command.index("--part") + 1]
        ResultFile(tmp_path / "kernels.json").update(running={"part": name, "name": f"{name}'s record"})
        programs = {
            "dies": f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})",
            "hangs": "import time; time.sleep(60)",
            "is empty": "",
        }
        (tmp_path / "kernels.log").write_text(f"{name} said this\n")
        ended.append(real([sys.executable, "-c", programs.get(name, "raise SystemExit(3)")], start_new_session=True))
        return ended[-1]  # type: ignore[no-any-return]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    limits = {"dies": 30, "hangs": 1, "is empty": 30, "last": 30}
    monkeypatch.setitem(SLICES, "kernels", tuple(Part(name, "", seconds) for name, seconds in limits.items()))
    assert not run_slice("kernels", tmp_path, size="full")
    errors = {record["name"]: record["error"] for record in _records(tmp_path, "kernels")}
    assert errors == {
        "dies's record": "the process was ended by SIGKILL",
        "hangs's record": "ended after its 1 s",
        "is empty": "it measured nothing",
        "last's record": "the process ended with code 3",
    }
    assert all(one.poll() is not None for one in ended)
    assert "    hangs said this\n" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "succeeds"), [("tiny", True), ("full", False)])
def test_what_is_skipped_fails_a_slice_of_full_size(
    size: str, succeeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal may skip what needs a GPU."""

    def skip(*_: Any, **__: Any) -> str:
        with Recorder(ResultFile(tmp_path / "kernels.json"), "p").record("not here"):
            raise SkippedError("liger-kernel is not installed")

    monkeypatch.setattr(supervise, "_run_process", lambda *_, **__: skip() or "")
    monkeypatch.setitem(SLICES, "kernels", (Part("p", "", 30),))
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


def _rehearse(name: str, part: str, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.gpu", name, "--part", part, "--size", "tiny", "--out", str(out)]
    done = start(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return _records(out, name)


def _assert_no_failure(records: list[dict[str, Any]]) -> None:
    assert records
    assert [record for record in records if record["result"] == "failed"] == []


@pytest.mark.parametrize(
    ("name", "part"), [("kernels", "machine"), ("kernels", "sizes"), ("kernels", "choices"), ("memory", "waits")]
)
def test_parts_run_to_their_end(name: str, part: str, tmp_path: Path) -> None:
    records = _rehearse(name, part, tmp_path)
    _assert_no_failure(records)
    assert any(record["result"] == "ok" for record in records)


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_imports_what_there_is(path: Path) -> None:
    """Names that a benchmark imports from the package exist."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("ds_finetune", "bench", "tests")):
            module = importlib.import_module(str(node.module))
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            assert not [name for name in missing if find_spec(f"{node.module}.{name}") is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_every_slice_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """By the command of a user, but in forks of one process where that is enough."""
    for part in SLICES[name]:
        _assert_no_failure(_rehearse(name, part.name, tmp_path))


@pytest.mark.slow
def test_the_script_runs_a_slice(tmp_path: Path) -> None:
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "SIZE": "tiny", "OUT": str(tmp_path)}
    command = ["bash", "scripts/gpu_check.sh", "throughput"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "throughput.json").read_text())["records"]
    _assert_no_failure(records)
    assert done.stdout.splitlines() == [*map(line_of, records), f"throughput: {len(records)} ok, 0 failed, 0 skipped"]


def test_operators_are_compiled_for_the_gpu_that_is_there(tmp_path: Path) -> None:
    """The script asks for the capability of the GPU, here of one that is not there."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    asked = "import torch\nfrom ds_finetune.engine import devices\n"
    asked += "devices.choose_device = lambda: 'cuda'\ntorch.cuda.get_device_capability = lambda: (8, 9)\n"
    (bin_folder / "python3").write_text(
        f"""#!/usr/bin/env bash
if [ "$1" = -c ]; then exec {sys.executable} -c {shlex.quote(asked)}"$2"; fi
echo "$DS_ACCELERATOR $TORCH_CUDA_ARCH_LIST $*"
"""
    )
    (bin_folder / "python3").chmod(0o755)
    environ = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    command = ["bash", "scripts/gpu_check.sh", "kernels", "memory"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "cuda 8.9 -m bench.gpu kernels memory --out runs/gpu_check --size full\n"
