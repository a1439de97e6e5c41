"""Where weights to export come from: checkpoints, DeepSpeed folders, model folders."""
