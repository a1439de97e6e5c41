"""Fixtures of more than one test file, the order of the files, and what a test process does not do twice."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import ADDRESSES, Forkserver
from tests.verifying import ADDRESS, verify_in_forks

ROOT = Path(__file__).resolve().parents[1]
# Started in the background of a script, this process ignores SIGINT, and so would every program that a test starts and
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# GPUs have scripts/gpu_check.sh: two ranks of a test would share one.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

_LONG = (
    "tests/cluster",
    "tests/checkpoint/test_layouts",
    "tests/parity",
    "tests/cluster/launch/test_launchers",
    "tests/checkpoint",
    "tests/test_api",
    "tests/trainer",
    "tests/engine",
    "tests/cluster/watchdog",
    "tests/export",
)


def pytest_configure(config: pytest.Config) -> None:
    """Test processes share the servers that fork."""
    if getattr(config.option, "numprocesses", None):
        os.environ.update(
            {ADDRESSES[is_plain]: Forkserver.get(is_plain=is_plain).address for is_plain in (False, True)}
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes first: two run at a time, and one that begins last would keep one core waiting."""
    items.sort(
        key=lambda item: next((place for place, name in enumerate(_LONG) if item.nodeid.startswith(name)), len(_LONG))
    )


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Workers of the default suite make none of the thousands of slow tests that would be deselected."""
    is_default_suite = hasattr(collector.config, "workerinput") and collector.config.option.markexpr == "not slow"
    if not is_default_suite or not name.startswith("test_"):
        return None
    return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else None


def pytest_sessionstart() -> None:
    """Nothing that collection makes is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """DeepSpeed collects garbage at each start and end of an engine, a second each time among everything imported and
    collected; frozen objects are left out.
    """
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def plain_forks() -> None:
    """Runs of the tests have their exports verified by forks."""
    os.environ[ADDRESS] = Forkserver.get(is_plain=True).address
    verify_in_forks()


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """A process group that a test opened in this process, or left open where it failed on purpose, is not the next
    one's.
    """
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_linear_of_deepspeed_left() -> Iterator[None]:
    """zero.Init of DeepSpeed 0.19.8 replaces torch's linear function for good (zero/partition_parameters.py:412)."""
    yield
    of_deepspeed = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    torchs = of_deepspeed and getattr(of_deepspeed.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if torchs:
        sys.modules["torch.nn.functional"].linear = torchs


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real tokenizers, configs and data beside the checkout; tests that need them skip where they are absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder.name}/ beside the checkout is absent")
    return folder
