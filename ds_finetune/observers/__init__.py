"""Observers, which are called after each step: they take its record and return it, perhaps with more values."""
