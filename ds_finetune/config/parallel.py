"""The section `parallel` of the run file."""

from pydantic import Field

from ds_finetune.config.section import Section


class ParallelConfig(Section):
    """Degrees of tensor, pipeline, expert and sequence parallelism; data parallelism takes the remaining ranks."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size: ranks that hold parts of every layer, cut by heads, inner width and vocabulary."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size: stages of consecutive layers, balanced by parameters."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each stage, where they are not to be balanced by parameters, e.g. after measuring: [12, 16]. With `vpp`
    the layers of each chunk, in the model's order.
    """
    vpp: int = Field(default=1, ge=1)
    """Virtual pipeline size: chunks of consecutive layers that each pipeline rank holds. With more than one
    (interleaved 1F1B), ranks wait less and send hidden states more often.
    """
    ep: int = Field(default=1, ge=1)
    """Expert parallel size: data (and sequence) parallel ranks that divide the routed experts among them."""
    sp: int = Field(default=1, ge=1)
    """Sequence parallel size: ranks that share the tokens of each row; attention is over whole rows, a part of the
    heads on each.
    """
