"""End a run as a whole when a rank fails, dies or hangs, and name the rank at fault."""
