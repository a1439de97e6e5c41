"""LoRA adapters: their modules, their plan, and reading them from peft's format."""
