"""Weights, optimizer states and step counts of a running engine by parameter name, for checkpoints and exports."""
