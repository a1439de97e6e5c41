"""Rewards: functions that score sampled answers, and the processes in which they run."""
