"""Training objectives: what the loss of a batch is, as sums over units whose number in the global batch is known."""
