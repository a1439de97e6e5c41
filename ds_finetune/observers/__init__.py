"""Observers, called after each optimizer step: each receives the step's record and returns it, possibly with more
values.
"""
