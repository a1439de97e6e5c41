"""HTTP server of answers from transformers or ONNX Runtime: checks, queues, answers and stops requests."""
