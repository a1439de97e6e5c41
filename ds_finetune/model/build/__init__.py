"""Builds the model of a run: its plan, its modules without weights, and tests of model types outside the table."""
