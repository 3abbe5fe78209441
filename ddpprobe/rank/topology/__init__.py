"""Topology: what wraps the model, what its parts are called, and who holds what."""
