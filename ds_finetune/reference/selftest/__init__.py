"""Compares the parallel layouts of this program with a reference PyTorch loop, on tiny models and the machines it runs
on.
"""
