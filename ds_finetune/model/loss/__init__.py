"""Losses that are computed in chunks of tokens: cross entropy, log-probabilities, scores, and distillation."""
