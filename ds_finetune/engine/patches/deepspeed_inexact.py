"""DeepSpeed's hierarchical partitions and ZenFlow: weights that they would replace by others when a run starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_finetune.foreign.guard import Foreign, replaced

_SECOND_COPY = Foreign("deepspeed", "runtime/zero/partition_parameters.py:1308, 1900, 1338")
_FLAT = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:263, 889; zenflow/zenflow_utils.py:20")


def forget_second_copies(module: nn.Module) -> None:
    """Drop the copies of weights that hierarchical partitions keep, so that the next forward makes new ones.

    DeepSpeed makes them when a parameter is first partitioned, before weights are loaded into its partition, and
    gathers from them until a step drops them: the first forward would compute with the values of an unloaded model.
    """
    for param in module.parameters():
        if hasattr(param, "ds_id"):
            _SECOND_COPY.attribute(param, "ds_secondary_tensor")
            param.ds_secondary_tensor = None  # type: ignore[attr-defined]


@contextmanager
def zenflow_keeps_matrices() -> Iterator[None]:
    """While this is open, the matrices of a model under ZenFlow at stages 1 and 2 keep their values.

    It joins the transposed matrices of a group to one flat tensor and then takes each parameter to be the elements in
    their former order, which scrambles every matrix: the loss of a pre-trained model was 18.9 instead of 7.0.
    """
    from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
    from deepspeed.runtime.zenflow.zenflow_utils import _flatten_dense_tensors

    plain = _FLAT.attribute(ZenFlowZeroOptimizer, "_update_model_bit16_weights")
    _FLAT.source(plain, "p.data = flat_group.narrow(0, offset, meta.numel()).view(meta.shape).data")
    _FLAT.source(_flatten_dense_tensors, "t.transpose(0, 1).contiguous() if t.dim() == 2 else t")

    def update(optimizer: Any, group_index: int) -> None:  # noqa: ANN401
        plain(optimizer, group_index)
        # The parameters are now contiguous views of their elements, in the order of the transposed matrix.
        for param in optimizer.bit16_groups[group_index]:
            if param.dim() == 2:
                rows, columns = param.shape
                param.data = param.data.view(columns, rows).t()

    with replaced(ZenFlowZeroOptimizer, "_update_model_bit16_weights", update):
        yield
