"""The metrics: their table, and how they are rendered for Prometheus."""
