"""Checkpoints that know no topology: state by parameter name and global index, written by every rank, complete or
absent.
"""
