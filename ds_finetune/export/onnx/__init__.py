"""Export to ONNX: graphs written operator by operator, and their verification."""

MODEL, DATA = "onnx/model.onnx", "onnx/model.onnx_data"
"""Names of the graph's file, and of the weight file beside a graph of more than 256 MiB. transformers.js looks for
these names; ONNX Runtime GenAI reads the name from genai_config.json.
"""
