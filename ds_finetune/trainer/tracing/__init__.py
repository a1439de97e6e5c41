"""Computes the activation memory and FLOPs of a rank by running the program's own modules on fake tensors."""
