"""DeepSpeed's compiled operators: which are needed, how they are built, and the lock of a build."""
