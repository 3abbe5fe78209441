"""What a running Prometheus says of what it watches: for `up --status`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ddpprobe.cli.local_server import get
from ddpprobe.rundir.validate import MALFORMED


def watched(url: str) -> dict[str, Any] | None:
    """Return the targets of a Prometheus, and what fires there; None if it does not answer.

    Args:
        url: of the Prometheus.

    Returns:
        `targets`: how many are `up`, `down`, and `unknown` as not scraped yet; `alerts`: the labels
        and the summary of those that fire, the oldest first, each with `since` (RFC 3339).
    """
    try:
        targets = json.loads(get(f"{url}/api/v1/targets?state=active"))["data"]["activeTargets"]
        alerts = json.loads(get(f"{url}/api/v1/alerts"))["data"]["alerts"]
        health = Counter(str(target["health"]) for target in targets)
        firing = [
            {
                **alert["labels"], "since": alert["activeAt"],
                "summary": alert["annotations"].get("summary", ""),
            }
            for alert in alerts
            if alert["state"] == "firing"
        ]  # fmt: skip
    except (OSError, *MALFORMED):
        return None
    known = {state: health[state] for state in ("up", "down", "unknown")}
    return {"targets": known, "alerts": sorted(firing, key=lambda alert: str(alert["since"]))}


def lines(state: dict[str, Any] | None) -> list[str]:
    """Say it for a person."""
    if state is None:
        return ["Prometheus does not answer"]
    many = ", ".join(f"{count} {health}" for health, count in state["targets"].items() if count)
    firing = [f"{alert['severity']}: {alert['summary']}" for alert in state["alerts"]]
    return [f"targets: {many or 'none'}", *(firing or ["no alert fires"])]
