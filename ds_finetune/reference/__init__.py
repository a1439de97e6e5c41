"""Reference PyTorch loops, and what compares the engine with them: the selftest and the benchmark."""
