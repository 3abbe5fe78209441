"""The PodMonitor: what of it can be checked without a cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "launch" / "kubernetes" / "podmonitor.yml"


def snake(value: Any) -> Any:
    """Return what the operator makes of its fields: the same in the words of Prometheus."""
    if isinstance(value, dict):
        return {
            re.sub(r"[A-Z]", lambda m: "_" + m[0].lower(), k): snake(v) for k, v in value.items()
        }
    return [snake(v) for v in value] if isinstance(value, list) else value


def test_prometheus_takes_what_the_operator_makes_of_it_and_each_run_gets_its_label(
    tmp_path: Path,
) -> None:
    monitor = yaml.safe_load(FILE.read_text())
    assert monitor["kind"] == "PodMonitor"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    relabelings = snake(endpoint["relabelings"])
    assert {r["target_label"] for r in relabelings} == {"run", "job"}
    scrape = {
        "job_name": "podmonitor",
        "metrics_path": endpoint["path"],
        "scrape_interval": endpoint["interval"],
        "static_configs": [{"targets": ["10.0.0.2:13377"]}],  # Debian's knows no Kubernetes
        "relabel_configs": relabelings,
    }
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    checked = subprocess.run(
        ["promtool", "check", "config", config], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
