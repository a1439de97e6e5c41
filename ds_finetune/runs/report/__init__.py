"""Reports of runs: a self-contained HTML page, and model cards of exports."""
