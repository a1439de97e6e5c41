"""The buffers through which weights reach NVMe: `train` checks them before it builds a model, `plan` by arithmetic."""

from collections.abc import Iterable

from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import Plan

_DEFAULT_BUFFER = 100_000_000
"""Elements, DeepSpeed's default of `buffer_size` (DeepSpeed 0.19.8, zero/offload_config.py)."""


def check_largest_slice(plan: Plan, tensors: Iterable[tuple[int, str]]) -> None:
    """ConfigError where a rank's slice of the largest of `tensors`, each with its elements and name, does not fit a
    buffer of `offload_param` to NVMe.

    DeepSpeed 0.19.8 fails an assertion for this while it builds the model
    (swap_tensor/partitioned_param_swapper.py:352).
    """
    if plan.offload_param != "nvme":
        return
    numel, name = max(tensors)
    section = plan.deepspeed["zero_optimization"]["offload_param"]
    needed, buffer_size = -(-numel // plan.zero_ranks), int(float(section.get("buffer_size", _DEFAULT_BUFFER)))
    if needed > buffer_size:
        raise ConfigError(
            f"offload_param.buffer_size {buffer_size:,} elements is smaller than a rank's slice of `{name}`, "
            f"{needed:,}",
            hint=f"set offload_param.buffer_size to {needed} or more, or train on more ranks than {plan.zero_ranks}",
        )
