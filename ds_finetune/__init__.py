"""Fine-tune DeepSeek-style causal LMs with DeepSpeed: a run is a value that is planned, fed, stepped, saved and exported."""

__version__ = "0.1.0"
