"""All changes to DeepSpeed's own code: one function each, with its reason and a version guard (foreign/guard.py)."""
