"""Compares the layouts of this program with a plain PyTorch loop, on tiny models, these machines and these versions."""
