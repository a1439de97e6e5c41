"""Labels the phases of a step for profiling, by wrapping methods of an engine. Without profiling nothing is wrapped."""

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager

from ds_finetune.engine.engine import Engine
from ds_finetune.engine.state.full_tensors import named_parameters
from ds_finetune.foreign.guard import replaced

STEP, FORWARD, BACKWARD, OPTIMIZER, EVALUATION, SAMPLING, OFFLOAD = (
    "step",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "sampling",
    "offload",
)
_OWN = {
    "step": STEP,
    "_forward": FORWARD,
    "_log_probs": FORWARD,
    "_step_optimizer": OPTIMIZER,
    "evaluate": EVALUATION,
    "generate": EVALUATION,
    "sample": SAMPLING,
}
_DEEPSPEED = {"backward": BACKWARD, "step": OPTIMIZER}
_OPTIMIZER_SWAPS = ("swap_in_optimizer_state", "swap_out_optimizer_state", "swap_out_gradients")
_PARAMETER_SWAPS = ("swap_in", "synchronize_reads", "swap_out_and_release", "swap_out_partitioned_params")
"""Methods of DeepSpeed's swappers that move data to and from NVMe (0.19.8, runtime/swap_tensor/)."""


@contextmanager
def wrapped_phases(engine: Engine, during: Callable[[str], ContextDecorator]) -> Iterator[None]:
    """Context in which `during(phase)` decorates the methods of `engine` that run the phases of a step."""
    methods = [
        *((engine, name, phase) for name, phase in _OWN.items()),
        *((engine._ds, name, phase) for name, phase in _DEEPSPEED.items()),
        *((swapper, name, OFFLOAD) for swapper, names in _swappers(engine) for name in names if hasattr(swapper, name)),
    ]
    with ExitStack() as stack:
        for owner, name, phase in methods:
            stack.enter_context(replaced(owner, name, during(phase)(getattr(owner, name))))
        yield


def _swappers(engine: Engine) -> Iterator[tuple[object, tuple[str, ...]]]:
    """DeepSpeed's NVMe swappers, each with its methods that move data; none without offload to NVMe."""
    optimizer = getattr(engine._ds.optimizer, "optimizer_swapper", None)
    if optimizer is not None:
        yield optimizer, _OPTIMIZER_SWAPS
    params = (param for _, param in named_parameters(engine._ds.module))
    swapper = next((candidate for param in params if (candidate := getattr(param, "nvme_swapper", None))), None)
    if swapper is not None:
        yield swapper, _PARAMETER_SWAPS
