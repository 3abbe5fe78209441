"""Hooks: what hangs on the model, and how one call of it becomes one row."""
