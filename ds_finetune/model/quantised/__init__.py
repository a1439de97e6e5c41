"""Weights in FP8, FP4 and four bits."""
