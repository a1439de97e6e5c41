"""Optional features of a run: LoRA, frozen parameters, router and indexer training, multi-token prediction, a
teacher.
"""
