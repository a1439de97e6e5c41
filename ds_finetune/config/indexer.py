"""The section `indexer` of the run file."""

from typing import Literal

from pydantic import Field

from ds_finetune.config.section import Section


class IndexerConfig(Section):
    """Indexers of DeepSeek sparse attention, which choose the tokens that a query attends to."""

    train: bool = False
    """Train them to score tokens as attention weighs them; false leaves them as they are."""
    stage: Literal["sparse", "dense_warmup"] = "sparse"
    """`sparse` trains them beside the other weights, by attention to the chosen tokens. `dense_warmup` trains them
    alone, by attention to all earlier tokens.
    """
    weight: float = Field(default=1.0, gt=0)
    """Weight of their loss; Adam's steps hardly depend on it."""
