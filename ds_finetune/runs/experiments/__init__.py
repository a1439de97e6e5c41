"""Experiments with several runs of a run file: sweeps, learning rate range tests, and scaling comparisons."""
