"""Models: their modules, weights, adapters and parallel shards, and the loss, which is computed in chunks."""
