"""Answers over HTTP from transformers or ONNX Runtime: what a request may ask for, whose turn it is, and how an answer is stopped."""
