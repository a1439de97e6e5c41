"""No run outlives the test that started it, whatever became of the test."""

from collections.abc import Iterator

import pytest

from tests.checkpoint.runs import Running


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    while Running.started:
        run = Running.started.pop()
        if run.process.poll() is None or run.ranks():
            run.kill()
