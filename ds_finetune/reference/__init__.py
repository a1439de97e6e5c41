"""Reference PyTorch training loops, and the commands that compare the engine with them: selftest and bench."""
