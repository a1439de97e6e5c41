"""Evaluates a model, and its base model on the same tokens: losses, answers, confidence intervals."""
