"""Builds a run's model: plan, modules without weights, and checks of model types outside the table of families."""
