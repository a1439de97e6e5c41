"""The export format GGUF: one file for llama.cpp and Ollama with weights, tokenizer, chat template and settings."""
