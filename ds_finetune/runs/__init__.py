"""Reading of run folders without torch: configuration, metrics, state, samples and what else a run leaves behind."""
