"""The selftest and the tests that need a GPU, as parts of the programme."""

import re
import subprocess
import sys
from pathlib import Path

from bench.gpu.results import Recorder

ROOT = Path(__file__).resolve().parents[2]
_TESTS = tuple(
    f"tests/model/{folder}/test_{name}.py"
    for folder, names in {
        "attention": ("packed_attention",),
        "experts": ("grouped_kernel",),
        "fused": ("operations",),
        "loss": ("head_chunks", "loss", "liger"),
        "memory": ("activation_offload",),
    }.items()
    for name in names
)


def run_selftest(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """`ds-finetune selftest` with one rank, over NCCL on a GPU: how many layouts equal a plain loop."""
    from ds_finetune.families.table import STANDARD_SELFTEST
    from ds_finetune.reference.selftest.run import Extent, selftest

    lines: list[str] = []
    with recorder.record("layouts of one rank against a plain loop") as values:
        try:
            selftest(None, Extent(2, ("qwen2",)) if is_tiny else Extent(3, STANDARD_SELFTEST), say=lines.append)
        finally:
            values["equal"] = sum(line.startswith("equal") for line in lines)
            values["wrong"] = [line.split("  ")[1] for line in lines if line.startswith("WRONG")]


def gpu_tests(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """The tests of kernels that are skipped without a GPU, and those beside them."""
    with recorder.record("tests of kernels") as values:
        report = folder / "tests.txt"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore"]
        command += _TESTS[:1] if is_tiny else _TESTS
        command += ["-k", "shapes_by"] if is_tiny else []
        with report.open("w") as out:
            done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
        lines = report.read_text().strip().splitlines()
        values |= {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped)", lines[-1])}
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        assert done.returncode == 0, "; ".join([*failed, lines[-1]])
        assert is_tiny or not values.get("skipped"), lines[-1]
