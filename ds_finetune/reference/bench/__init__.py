"""`ds-finetune bench`: times the training step in comparison with ordinary PyTorch loops."""
