"""Dashboards, alert rules and the metrics reference as code. `python -m grafana.build` writes them."""
