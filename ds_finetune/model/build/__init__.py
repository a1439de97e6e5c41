"""Builds the model of a run: its plan, its modules without weights, and tests of unknown model types."""
