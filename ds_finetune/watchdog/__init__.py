"""What each rank is doing, the connection between ranks, which rank is at fault, and how a run is ended."""
