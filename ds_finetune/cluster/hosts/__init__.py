"""Checks of one host, and hosts that cannot be reached."""
