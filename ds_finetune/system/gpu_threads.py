"""The GPU of a thread."""

import torch


def use_device(device: torch.device) -> None:
    """Let CUDA calls of this thread use `device`; nothing for a CPU.

    CUDA has a current device for each thread, GPU 0 at first, and makes a context of about 0.5 GiB there at the first
    call: a thread that touches CUDA has to call this before.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
