"""Evaluation of a model, and of its base model on the same tokens: losses, answers, confidence intervals."""
