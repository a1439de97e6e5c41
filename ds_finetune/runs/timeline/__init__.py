"""Where the time of optimizer steps goes: a trace of all ranks on one clock, and a summary in seconds."""
