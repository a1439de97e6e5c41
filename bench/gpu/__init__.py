"""The GPU programme: what only a GPU can show, in slices of under ten minutes whose results are JSON files.

`scripts/gpu_check.sh` starts it; `docs/how-to/gpu-check.md` says how. Times are of one process on one GPU, after a step
or call that warms up.
"""
