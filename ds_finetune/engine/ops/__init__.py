"""DeepSpeed's compiled operators: which ones a run needs, their compilation, and the lock of a build."""
