"""Alertmanager's configuration: one notification for a run and what is wrong with it."""

from __future__ import annotations

from typing import Any

from grafana.alerts import ECHOES, Echo
from grafana.rule_files import PREFIX, written

RECEIVER = "ddpprobe"
NOBODY = "nobody"
RUN = ["job", "run"]
REPEAT = "12h"  # of what is still so
# A page does not wait longer after a warning of the same run than it would alone.
INTERVAL = "30s"


def alertmanager_yaml() -> str:
    """Return the file; the waits are Alertmanager's own, for which the rules are made."""
    tree = {
        "route": {
            "receiver": RECEIVER,
            "group_by": RUN,
            "group_interval": INTERVAL,
            "repeat_interval": REPEAT,
            # To be seen in Alertmanager and on the dashboard.
            "routes": [{"receiver": NOBODY, "matchers": ['severity="info"']}],
        },
        "receivers": [{"name": RECEIVER, "webhook_configs": []}, {"name": NOBODY}],
        "inhibit_rules": [_inhibition(echo) for echo in ECHOES],
    }
    return written("grafana/routing.py", tree)


def _inhibition(echo: Echo) -> dict[str, Any]:
    only = [echo.only] if echo.only else []
    return {
        "source_matchers": [_any_of(echo.sources)],
        "target_matchers": [_any_of(echo.targets), *only],
        "equal": list(RUN),
    }


def _any_of(names: tuple[str, ...]) -> str:
    return f'alertname=~"{PREFIX}({"|".join(names)})"'
