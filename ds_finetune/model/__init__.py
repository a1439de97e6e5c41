"""Models: their modules, weights, adapters and shards, and the loss, which is computed chunk by chunk."""
