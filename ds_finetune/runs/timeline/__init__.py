"""Where the time of optimizer steps goes: torch.profiler's traces of all ranks on one clock, and a table of seconds."""
