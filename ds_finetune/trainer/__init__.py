"""One run from its configuration to its report; `train.py` is the page to read first."""
