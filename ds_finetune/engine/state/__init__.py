"""Weights, moments and steps of a running engine, by parameter name, for checkpoints and exports."""
