"""Ends a run on all ranks when a rank fails, dies or hangs, and names the rank at fault."""
