"""Process groups, collectives, and what they send."""
