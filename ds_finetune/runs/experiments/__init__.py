"""Several runs of one run file: sweeps, tests of learning rates, and comparisons of ranks and layouts."""
