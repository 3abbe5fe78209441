"""Tensor to row: the statistics of one tensor, computed on its own device."""
