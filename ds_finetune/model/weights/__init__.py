"""Reads weights from files by name. Each rank reads only its own part of each tensor."""
