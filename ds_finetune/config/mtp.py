"""The section `mtp` of the run file."""

from pydantic import Field

from ds_finetune.config.section import Section


class MtpConfig(Section):
    """Multi-token prediction: a layer after the last one that predicts the token after the next, from which servers
    draft tokens.
    """

    train: bool = False
    """Train the layer that the model is published with; false carries it to exports unchanged."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of its loss beside that of the next token."""
    detach: bool = True
    """Its loss trains the layer alone: all other weights are the same bits as without it. False trains them too."""
