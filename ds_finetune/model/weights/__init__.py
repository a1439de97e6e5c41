"""Reads weights from files by name. Each rank reads the part of each tensor that it holds."""
