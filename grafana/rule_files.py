"""The alert rules as the file that Prometheus reads, and as the object that its operator reads."""

from __future__ import annotations

from typing import Any

import yaml

from grafana.alerts import (
    ALERTS,
    DASHBOARD,
    GRAFANA_URL,
    RECORDINGS,
    RUNBOOK_BASE,
    Alert,
    Recording,
)

PREFIX = "Ddpprobe"
_VARIABLES = "var-job={{ $labels.job | urlquery }}&var-run={{ $labels.run | urlquery }}"


def rules_yaml() -> str:
    """Return the rule file."""
    return written("grafana/alerts.py", {"groups": _groups()})


def prometheus_rule_yaml() -> str:
    """Return the same rules as the object that the Prometheus operator reads."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "ddpprobe"},
        "spec": {"groups": _groups()},
    }
    return written("grafana/alerts.py", rule)


def _groups() -> list[dict[str, Any]]:
    return [
        {"name": "ddpprobe.rules", "rules": [_recording(r) for r in RECORDINGS]},
        {"name": "ddpprobe.alerts", "rules": [_alert(a) for a in ALERTS]},
    ]


def written(source: str, tree: dict[str, Any]) -> str:
    """Return a file that is made from a module, as YAML."""
    head = f"# Made by `python -m grafana.build` from {source}; edit that.\n"
    return head + yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=1000)


def _recording(recording: Recording) -> dict[str, Any]:
    return {"record": recording.name, "expr": _Block(recording.expr + "\n")}


def _alert(alert: Alert) -> dict[str, Any]:
    name = f"{PREFIX}{alert.name}"
    return {
        "alert": name,
        "expr": _Block(alert.expr + "\n"),
        **({"for": alert.wait} if alert.wait else {}),
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{RUNBOOK_BASE}/{name}.md",
            "dashboard_url": f"{GRAFANA_URL}/d/{DASHBOARD}?{_VARIABLES}",
        },
    }


class _Block(str):
    """A text that YAML writes line by line."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """The safe dumper, and blocks."""


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)
