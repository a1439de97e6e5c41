"""The end of training: a Hugging Face folder that plain transformers loads."""
