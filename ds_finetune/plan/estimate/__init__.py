"""What a planned run needs on a rank: memory, time and traffic, from plain numbers and without torch."""
