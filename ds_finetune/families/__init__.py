"""Model families: what this program supports for each `model_type` of transformers."""
