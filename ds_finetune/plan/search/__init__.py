"""Finds the layouts that a run may have on given machines, and those that fit, without torch."""
