"""Losses and answers of two models on the same token ids, and what chance could do to the difference."""
