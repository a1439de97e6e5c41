"""The label value of tokens without loss."""

IGNORE_INDEX = -100
"""Label of a position without loss; the value torch's cross entropy ignores by default."""
