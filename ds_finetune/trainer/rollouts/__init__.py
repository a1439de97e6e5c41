"""Rollouts: answers sampled from the model that is trained, scored by rewards, and made into batches of its steps."""
