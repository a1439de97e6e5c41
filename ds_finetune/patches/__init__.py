"""Every change to code of other packages: one function or context manager each, with its reason and a version guard.

A guard looks for the feature a change relies on (an attribute, a parameter, a line of source), whatever the version.
Where the feature is gone, it raises DependencyError before anything is changed. `python -m pytest tests/patches`
shows for each patch that it does.

Subclasses, classes of modules that a run built itself, and attributes that a library reads from its arguments are no
changes to foreign code, and lie where they are used.
"""
