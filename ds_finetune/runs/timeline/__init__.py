"""Profiles of optimizer steps: torch.profiler's traces of all ranks on one clock, and seconds by kind of work."""
