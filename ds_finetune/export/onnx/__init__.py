"""The ONNX folder: graphs written operator by operator, and their verification."""

MODEL, DATA = "onnx/model.onnx", "onnx/model.onnx_data"
"""Files of an ONNX folder: the graph, and its weights if they are not in it. transformers.js looks for these names,
ONNX Runtime GenAI for the name in genai_config.json.
"""
