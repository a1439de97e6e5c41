"""Arithmetic before anything is loaded: the batch triple, the legal options and the finished DeepSpeed
configuration.
"""
