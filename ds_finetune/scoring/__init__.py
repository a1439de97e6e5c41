"""An exported model scored on held-out rows beside the model it was trained from, with plain transformers."""
