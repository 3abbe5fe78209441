"""The store in an object store: uploaded group by group, and downloaded into a copy."""
