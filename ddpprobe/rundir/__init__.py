"""A run's directory, and what passes through it: paths, frames, journals, heartbeats, orders."""
