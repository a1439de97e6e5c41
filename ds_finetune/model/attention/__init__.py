"""Attention within each document of packed rows, and sparse attention with an indexer."""
