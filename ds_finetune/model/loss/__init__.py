"""Losses computed chunk by chunk: tokens, log-probabilities, scores, a teacher's distribution."""
