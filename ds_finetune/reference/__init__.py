"""Plain PyTorch loops, and what is compared with them: the selftest and the benchmark."""
