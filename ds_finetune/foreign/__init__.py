"""All patches of other packages' code: one function or context manager for each, with its reason and a version guard.

A guard checks that the installed version still has what the patch needs: an attribute, a parameter or a line of source.
If not, it raises DependencyError before anything is changed. `python -m pytest tests/foreign` tests each guard.

Three ways to change behaviour are not patches and stay where they are used: subclasses, a new `__class__` for modules
of a run, and attributes that a library reads from its arguments.
"""
