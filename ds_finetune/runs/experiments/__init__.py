"""Experiments with several runs of one run file: sweeps, learning rate range tests, and comparisons of rank numbers and
layouts.
"""
