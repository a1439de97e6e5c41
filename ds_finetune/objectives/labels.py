"""The label of tokens without loss."""

IGNORE_INDEX = -100
"""Label of a token without loss, which torch's cross entropy ignores by default."""
