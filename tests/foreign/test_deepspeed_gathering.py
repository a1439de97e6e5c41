"""Gathers of parameters that one rank holds whole make the host wait where a buffer on the host is used again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import (
    NoGatherCoalescedHandle,
    NoGatherHandle,
    ZeroParamStatus,
)

from ds_finetune.engine.patches.deepspeed_gathering import single_gathers_without_waits
from tests.host_waits import imagined_accelerator


def _begun(location: OffloadDeviceEnum | None) -> Any:
    """A parameter whose gather begins, with its values at `location`."""
    param: Any = torch.nn.Parameter(torch.zeros(0))
    param.ds_tensor = torch.arange(6.0)
    param.ds_tensor.final_location = location
    param.ds_shape, param.ds_status = torch.Size([2, 3]), ZeroParamStatus.INFLIGHT
    param.ds_summary = SimpleNamespace
    return param


@pytest.mark.parametrize(("location", "waits"), [(None, 0), (OffloadDeviceEnum.cpu, 0), (OffloadDeviceEnum.nvme, 1)])
@pytest.mark.parametrize("number", [1, 3])
def test_the_host_waits_for_parameters_on_nvme_alone(
    location: OffloadDeviceEnum | None, waits: int, number: int
) -> None:
    params = [_begun(location) for _ in range(number)]
    with imagined_accelerator() as host, single_gathers_without_waits():
        handle = NoGatherHandle(params[0]) if number == 1 else NoGatherCoalescedHandle(params)
        host.reset()
        handle.wait()
        handle.wait()
        found = sum(host.found.values())
    assert found == waits
    assert all(param.ds_status is ZeroParamStatus.AVAILABLE for param in params)
    assert all(torch.equal(param, torch.arange(6.0).view(2, 3)) for param in params)
