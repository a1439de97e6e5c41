"""Ranks whose hosts have other versions, or choose other kernels, end before step 1 with both values."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.running import start, tiny_task, torchrun
from tests.system.test_versions import install

WORKER = str(Path(__file__).with_name("other_host_worker.py"))


def test_another_version_on_a_rank_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Both are within the tested range, and each rank alone would train."""
    folder = install(tmp_path / "other", "deepspeed", "0.19.99")
    done = start(torchrun(WORKER, "versions", str(folder), str(tiny_task(tmp_path))))
    for rank in (0, 1):
        assert f"rank {rank}: exit code 2\n" in done.stdout, done.stdout + done.stderr
    told = " ".join(done.stderr.split())
    assert f"ranks differ in deepspeed: {version('deepspeed')} on rank 0 (" in told, told
    assert ") and 0.19.99 on rank 1 (" in told
    assert "install the same versions on every host" in told
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_a_host_without_a_compiler_does_not_take_other_kernels_silently(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = start(torchrun(WORKER, "kernels", str(tmp_path)))
    for rank in (0, 1):
        assert f"rank {rank}: exit code 2\n" in done.stdout, done.stdout + done.stderr
    assert "ranks differ in model.kernels: " in done.stderr
    assert "there is no C compiler (gcc or clang)" in done.stderr
    assert "missing parts on every host, or set model.kernels: torch" in done.stderr
