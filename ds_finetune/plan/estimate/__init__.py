"""What a planned run needs on a rank: memory and disk, from plain numbers and without torch."""
