"""Process groups and collectives, and counts of what they send."""
