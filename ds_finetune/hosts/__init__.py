"""What a host reports about itself and its processes, and the checks that both `launch` and `doctor` run on it."""
