"""Reads run folders without torch: configuration, metrics, state, samples and other files of a run."""
