"""Observers: objects that are called after each optimizer step with its metrics, and may add metrics or end the run."""
