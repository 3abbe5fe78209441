"""Capture: whole activations and gradients in memory, for a person at work on a model."""
