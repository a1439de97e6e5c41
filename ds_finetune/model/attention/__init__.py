"""Attention by document, in packed rows, and sparse attention with an indexer."""
