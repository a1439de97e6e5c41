"""The only place that imports DeepSpeed: start, step, evaluate, and the parts of the state."""
