"""Training data, from files to batches: sources, layouts, tokens with loss masks, packing, cache and sampling."""
