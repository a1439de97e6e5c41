"""Exports: Hugging Face and ONNX folders, and their verification."""
