"""Rewards: functions that score sampled answers, and worker processes that run them."""
