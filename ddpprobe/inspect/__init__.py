"""For a person at work on a model: its tensors in memory, and its table of modules."""
