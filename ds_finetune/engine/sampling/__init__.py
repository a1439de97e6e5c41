"""Sampling of answers from the model that is being trained."""
