"""HTTP server for the answers of an exported model, computed by transformers or ONNX Runtime."""
