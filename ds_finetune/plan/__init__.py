"""Plans a run before anything is loaded: batch sizes, refused settings, and the DeepSpeed configuration."""
