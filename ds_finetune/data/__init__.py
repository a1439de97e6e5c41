"""From files to batches: sources, layouts, exact loss masks, packing, cache, and a sampler whose position is a
number.
"""
