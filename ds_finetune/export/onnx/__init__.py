"""The ONNX folder: graphs written operator by operator, and their verification."""

MODEL, DATA = "onnx/model.onnx", "onnx/model.onnx_data"
"""Files of an ONNX folder: its graph, and its weights where they are not in it. transformers.js looks for these names,
and ONNX Runtime GenAI for the one in genai_config.json."""
