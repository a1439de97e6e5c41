"""The section `router` of the run file."""

from pydantic import Field

from ds_finetune.config.section import Section


class RouterConfig(Section):
    """How routers, which choose experts, are trained; left out, they are trained like all weights."""

    train: bool = True
    """Whether their weights are trained; false leaves them as they are."""
    balance: float = Field(default=0.0, ge=0)
    """Weight of the balance loss of experts, which is 1 for each layer whose experts are chosen alike; 0 has none."""
    bias_update: float = Field(default=0.0, ge=0)
    """How far the bias of each expert is moved after a step, down where it was chosen more often than the mean expert
    and up where less; 0 leaves biases as they are.
    """
