"""Features, the optional parts of a model or its training: adapters, frozen parameters, routers, indexers, multi-token
prediction and a teacher.
"""
