"""Weights in FP8, MXFP4 and FP4, which are dequantised when read, and frozen weights in four bits."""
