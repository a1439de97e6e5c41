"""Every change to code of other packages: one function or context manager each, with its reason and a version guard.

A guard checks the feature that a change relies on (an attribute, a parameter, a line of source) in the installed
version. Where the feature is missing, it raises DependencyError before it changes anything. `python -m pytest
tests/foreign` tests each guard.

Three things do not change foreign code and are where they are used: subclasses, changed classes of modules that a run
has built, and attributes that a library reads from its arguments.
"""
