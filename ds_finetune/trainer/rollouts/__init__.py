"""Rollouts: answers sampled from the model being trained, scored by rewards, and made into batches of steps."""
