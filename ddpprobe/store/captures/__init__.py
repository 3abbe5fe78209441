"""Captured tensors in the store: folded from the ranks' packs, and read back."""
