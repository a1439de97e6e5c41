"""Runs of experiments are stood in for by programs without torch."""

import pytest

from ds_finetune.runs.experiments import jobs


@pytest.fixture(autouse=True)
def fake_program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that the test file names as `FAKE`; `test_real_runs` undoes it."""
    monkeypatch.setattr(jobs, "_PROGRAM", request.module.FAKE)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
