"""Checkpoints that any layout of ranks can read: every rank writes its part of the state, by parameter name and index.

A checkpoint is complete once its folder has its final name (commit.py); saver.py writes it, and restore.py reads it.
"""
