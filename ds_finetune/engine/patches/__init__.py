"""All changes to DeepSpeed's own code: one function or context manager each, with its reason and a version guard
(foreign/guard.py).
"""
