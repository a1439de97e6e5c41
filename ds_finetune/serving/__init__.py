"""Answers over HTTP from transformers or ONNX Runtime: requests are checked, queued, answered and stopped."""
