"""Sampled answers to prompts by the model that is being trained."""
