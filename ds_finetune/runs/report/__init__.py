"""Reports of runs: one self-contained HTML page, a picture of the loss, and the model card of an export."""
