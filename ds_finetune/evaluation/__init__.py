"""Scores a model, and its base model on the same token ids: losses, answers and confidence intervals."""
