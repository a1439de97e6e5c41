"""Fixtures of more than one test file."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Started in the background of a script, this process ignores SIGINT, and so would every program that a test starts and
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


_LONG = (
    "tests/cluster",
    "tests/checkpoint/test_layouts",
    "tests/parity",
    "tests/launch/test_launchers",
    "tests/checkpoint",
    "tests/test_api",
    "tests/trainer",
    "tests/engine",
    "tests/watchdog",
    "tests/export",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes first: two run at a time, and one that begins last would keep one core waiting."""
    items.sort(
        key=lambda item: next((place for place, name in enumerate(_LONG) if item.nodeid.startswith(name)), len(_LONG))
    )


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """A process group that a test opened in this process, or left open where it failed on purpose, is not the next
    one's.
    """
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real tokenizers, configs and data beside the checkout; tests that need them skip where they are absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder.name}/ beside the checkout is absent")
    return folder
