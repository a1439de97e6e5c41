"""Tables, progress lines of phases, and filters for other packages' messages."""
