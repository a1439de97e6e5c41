"""Features: parts of a model and its training that the run file turns on (adapters, routers, indexers, multi-token
prediction, teacher).
"""
