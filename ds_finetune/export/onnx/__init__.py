"""The ONNX folder: graphs written operator by operator, and their verification."""

MODEL, DATA = "model.onnx", "model.onnx.data"
"""Files of an ONNX folder: its graph, and its weights where they are not in it."""
