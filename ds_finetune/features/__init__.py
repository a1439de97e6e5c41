"""Parts of a model and of its training that the run file turns on: adapters, routers, indexers, prediction, teacher."""
