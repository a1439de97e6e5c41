"""LoRA adapters: their modules, the plan which modules are adapted, and reading adapters in peft's format."""
