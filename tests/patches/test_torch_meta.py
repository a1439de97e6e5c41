"""Models made on the meta device leave other devices as they were."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils import _device

from ds_finetune.patches.torch_meta import ranges_on_cpu


@pytest.fixture
def as_in_a_new_process() -> Iterator[None]:
    """torch has not looked up which functions take a device."""
    _device._device_constructors.cache_clear()
    yield
    _device._device_constructors.cache_clear()


@pytest.mark.usefixtures("as_in_a_new_process")
def test_ranges_are_made_on_later_devices() -> None:
    with torch.device("meta"), ranges_on_cpu():
        assert torch.arange(3).device.type == "cpu"
    with torch.device("meta"):
        assert torch.arange(3).is_meta
