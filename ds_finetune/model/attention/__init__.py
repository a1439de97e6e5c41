"""Attention that keeps packed documents apart, and sparse attention with an indexer."""
