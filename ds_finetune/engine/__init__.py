"""The engine, which drives DeepSpeed: start, step, evaluation, generation, and the state for checkpoints."""
