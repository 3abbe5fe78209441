"""A run in the formats of others: OpenMetrics, blocks of Prometheus, CSV, Parquet."""
