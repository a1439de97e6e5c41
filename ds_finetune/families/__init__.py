"""The table of model families: a row per model type, with its optional capabilities."""
