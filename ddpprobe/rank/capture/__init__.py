"""Full tensors of chosen modules on chosen steps, copied to packs on the disk."""
