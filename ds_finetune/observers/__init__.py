"""Observers, called after each optimizer step: each gets the step's record and returns it, perhaps with more values."""
