"""The ONNX folder: graphs written operator by operator, and their verification."""
