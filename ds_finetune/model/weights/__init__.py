"""Reading weights from files into the parts that a rank holds, by name."""
