"""The model of a run: its modules, weights, LoRA adapters, parallel shards and losses."""
