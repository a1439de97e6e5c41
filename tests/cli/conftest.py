"""Commands run in this process set variables of its environment, which each test gives back."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environ() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
