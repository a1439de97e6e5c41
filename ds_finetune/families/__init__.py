"""The table of model families: one row for each model type, with its optional capabilities."""
