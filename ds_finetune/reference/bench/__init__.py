"""`ds-finetune bench`: times the training step beside ordinary PyTorch loops."""
