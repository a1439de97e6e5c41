"""Features: optional parts of a model: adapters, routers, indexers, multi-token prediction, teacher."""
