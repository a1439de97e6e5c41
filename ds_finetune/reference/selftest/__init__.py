"""Compares this program's layouts of ranks with a plain PyTorch loop, on tiny models and the machines it runs on."""
