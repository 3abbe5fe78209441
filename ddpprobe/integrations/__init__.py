"""Training frameworks: one file each, which is imported only by whoever uses that framework."""
