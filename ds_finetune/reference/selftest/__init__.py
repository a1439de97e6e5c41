"""Compares this program's parallel layouts with a reference PyTorch loop, on tiny models."""
