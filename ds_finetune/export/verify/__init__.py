"""Verifies that an exported folder is the model that was trained."""
