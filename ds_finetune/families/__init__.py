"""What the program knows of each model family: one row of a table, with optional capabilities."""
