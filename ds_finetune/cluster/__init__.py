"""Several processes and machines: starting them, watching them, checking them before a run."""
