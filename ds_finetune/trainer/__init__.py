"""One run from its configuration to its report; read `train.py` first."""
