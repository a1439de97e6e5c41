"""Reads weights from files, by name, into the parts that a rank holds."""
