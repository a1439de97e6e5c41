"""The selftest and the tests of kernels, as parts of the programme."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.gpu.results import Recorder, Values
from ds_finetune.foreign.guard import replaced

ROOT = Path(__file__).resolve().parents[2]
_TESTS = (
    "fused/test_operations",
    "experts/test_grouped_kernel",
    "loss/test_liger",
    "loss/test_head_chunks",
    "memory/test_activation_offload",
    "attention/test_packed_attention",
)


def layouts(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """`ds-finetune selftest` with one rank, over NCCL on a GPU: each layout of DeepSeek-V3 and Llama against a plain
    loop.
    """
    from ds_finetune.reference.selftest import run
    from ds_finetune.reference.selftest.compare import LayoutComparison

    values, began = Values(), time.perf_counter()
    compare = run.compare_layout

    def noted(*given: Any, **options: Any) -> LayoutComparison | None:  # noqa: ANN401
        found = compare(*given, **options)
        if found is not None:
            values.update(found.differences)
            values.limits.update(found.limits)
        return found

    def say(line: str) -> None:
        nonlocal values, began
        verdict = {"equal": "ok", "WRONG": "failed"}.get(line.split()[0])
        if verdict is not None:
            why = {} if verdict == "ok" else {"error": "differs from the plain loop"}
            name = line.split("  ")[1]
            recorder.add(name, verdict, seconds=time.perf_counter() - began, values=values, **why)
            values, began = Values(), time.perf_counter()

    size = run.SelftestSize(2, ("qwen2",)) if is_tiny else run.SelftestSize(3, ("deepseek_v3", "llama"))
    with recorder.record("all layouts"), replaced(run, "compare_layout", noted):
        run.selftest(None, size, say=say)


def kernel_tests(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """The tests of kernels by torch.compile, Liger and Triton, which run on a GPU where there is one."""
    import pytest

    files = [f"tests/model/{name}.py" for name in _TESTS]
    arguments = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore", f"--rootdir={ROOT}"]
    arguments += ["-k", "shapes_by"] if is_tiny else []
    for file in files[-1:] if is_tiny else files:
        with recorder.record(file) as values:
            results = _Results()
            code = pytest.main([*arguments, str(ROOT / file)], plugins=[results])
            values |= results.counts
            values |= {"skipped because": sorted(results.reasons)} if results.reasons else {}
            assert not results.failed, "; ".join(results.failed)
            assert code == 0, f"pytest ended with {code}"
            assert is_tiny or values["passed"]


class _Results:
    """A plugin of pytest: tests by outcome, and why some were skipped."""

    def __init__(self) -> None:
        self.counts = Counter({"passed": 0, "skipped": 0})
        self.failed: list[str] = []
        self.reasons = set[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401
        """Count a test by its call, or by its setup where that did not pass."""
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.skipped:
            self.reasons.add(str(report.longrepr[2]).removeprefix("Skipped: "))
        if report.failed:
            self.failed.append(report.nodeid.rpartition("/")[2])
