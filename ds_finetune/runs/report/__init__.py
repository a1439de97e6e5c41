"""Reports of runs: a self-contained HTML page, a picture of the loss, and model cards of exports."""
