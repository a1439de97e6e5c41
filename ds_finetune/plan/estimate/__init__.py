"""Estimates of memory and disk space that a rank of a planned run needs; computed from plain numbers, without torch."""
