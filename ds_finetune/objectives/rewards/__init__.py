"""Rewards: functions that score sampled answers, and the worker processes in which they run."""
