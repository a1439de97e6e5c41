"""Time of optimizer steps by kind: torch.profiler's traces of all ranks on one clock, and a table of seconds."""
