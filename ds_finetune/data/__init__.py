"""Training data, from files to batches: sources, record layouts, tokens with loss masks, packing, cache, mixtures."""
