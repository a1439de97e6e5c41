"""Model families, loading and fresh weights where each tensor lives, and the loss that never builds the logits."""
