"""The engine, which drives DeepSpeed: training steps, evaluation, generation, and the state for checkpoints."""
