"""What happens on steps: each observer takes the record of a step and returns it, perhaps with more values."""
