"""Optional features of a run: LoRA, freezing, training of routers and indexers, multi-token prediction, a teacher."""
