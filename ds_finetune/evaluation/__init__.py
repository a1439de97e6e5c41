"""Evaluation of a model, optionally beside its base model on the same token ids: losses, generated answers and
confidence intervals.
"""
