"""Ranks that watch each other: a run that stands still, or loses a rank, ends everywhere and says which rank was the odd one."""
