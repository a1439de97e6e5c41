"""Readers of the weights to export: from checkpoints, DeepSpeed folders, adapters and model folders."""
