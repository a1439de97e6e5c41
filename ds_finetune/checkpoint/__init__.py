"""Checkpoints that any parallel layout can read: each rank writes its part of the state, by parameter name and index.

A checkpoint is complete when its folder has its final name (commit.py). saver.py writes checkpoints, and restore.py
reads them.
"""
