"""Selects the GPU that a thread uses."""

import torch


def use_device(device: torch.device) -> None:
    """Select the GPU `device` for CUDA calls of this thread; no effect for a CPU.

    CUDA has a current device per thread, initially GPU 0, and its first call creates a context of about 0.5 GiB on that
    device. So a thread must call this before it uses CUDA.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
