"""HTTP server of answers from transformers or ONNX Runtime: checks, queues and answers requests, and stops
generation.
"""
