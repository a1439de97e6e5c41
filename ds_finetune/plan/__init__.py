"""Decides a run before anything is loaded: batch sizes, refused settings, and the finished DeepSpeed configuration."""
