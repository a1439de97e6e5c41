"""Reads weights in FP8, MXFP4 and FP4, and keeps frozen weights in four bits."""
