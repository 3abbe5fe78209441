"""Writes every generated file: dashboards, alert rules, references, what alerts hold back.

    python -m grafana.build [DIR]

DIR is where they go, laid out as in the repository (default: the repository itself).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana import fleet, modules, ranks, reference, routing, rule_files, run

HOME = Path(__file__).parent.parent
BOARDS = (run, modules, ranks, fleet)
# Grafana 11 loads this version; newer ones migrate it. The SDK writes a later one.
SCHEMA_VERSION = 39
# Fields of the SDK's schema that Grafana 11's does not have.
NEWER = {"placement"}


def dashboard_json(board: dashboard.Dashboard) -> str:
    """Return a dashboard as classic JSON."""
    tree: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    tree = _without(tree, NEWER)
    tree["schemaVersion"] = SCHEMA_VERSION
    tree.pop("id", None)
    for variable in tree["templating"]["list"]:
        for key in [k for k in variable if k.startswith("auto")]:
            del variable[key]
    for panel in tree["panels"]:
        for each in (panel, *panel.get("panels", [])):
            if each["type"] == "table":
                each["options"].pop("footer", None)
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _without(node: Any, keys: set[str]) -> Any:  # noqa: ANN401  (any JSON)
    """Return a copy of a JSON tree without some fields; a legend's placement is no such field."""
    if isinstance(node, dict):
        legend = "showLegend" in node
        return {k: _without(v, keys) for k, v in node.items() if legend or k not in keys}
    return [_without(v, keys) for v in node] if isinstance(node, list) else node


def files() -> dict[str, str]:
    """Return every generated file by its path in the repository."""
    return {
        **{f"grafana/dashboards/{b.UID}.json": dashboard_json(b.build()) for b in BOARDS},
        "grafana/rules/ddpprobe.yml": rule_files.rules_yaml(),
        "launch/kubernetes/prometheusrule.yml": rule_files.prometheus_rule_yaml(),
        "grafana/alertmanager/alertmanager.yml": routing.alertmanager_yaml(),
        "docs/how-to/alerts.md": reference.echoes(
            (HOME / "docs/how-to/alerts.md").read_text("utf-8")
        ),
        "docs/reference/metrics.md": reference.metrics(),
        "docs/reference/detectors.md": reference.detectors(
            (HOME / "docs/reference/detectors.md").read_text("utf-8"),
            (HOME / "docs/detection.md").read_text("utf-8"),
        ),
    }


def main() -> None:
    """Write them."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else HOME
    for name, text in files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
