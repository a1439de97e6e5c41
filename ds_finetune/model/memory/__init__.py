"""Less memory for activations: offload, and MLPs that take some tokens at a time."""
