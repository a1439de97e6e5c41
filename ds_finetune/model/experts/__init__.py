"""Routers of mixtures of experts, and their balance losses."""
