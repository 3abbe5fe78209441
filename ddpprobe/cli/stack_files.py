"""The files of `up`: configuration, rules, runbooks and dashboards of the package, for one place.

What is in the package is changed by replacing texts that must be in it, so that neither is silently
out of step with the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddpprobe.rundir import paths

PROMETHEUS, ALERTMANAGER = "prometheus.yml", "alertmanager.yml"
RULES, TARGETS = "rules/ddpprobe.yml", "targets/ddpprobe.json"
RUNBOOKS = "runbooks"
WRITTEN = ".ddpprobe-up.json"  # the checksum of each file as it was written
OPTIONS = ".ddpprobe-up.options.json"  # what was asked for, for the next `up`
GRAFANA = "http://localhost:3000"  # where Grafana listens by itself
# What the files of the package say, to be replaced.
_PROVISIONED = "/etc/grafana/dashboards/ddpprobe"
_SOURCE = "http://127.0.0.1:9090"
_RULE_FILES, _TARGET_FILES = "[../rules/ddpprobe.yml]", '["targets/*.json"]'
_ALERTMANAGERS = "[{static_configs: [{targets: [127.0.0.1:9093]}]}]"
_JOB = "  - job_name: ddpprobe\n"
_NO_WEBHOOK = "webhook_configs: []"
_RUNBOOK = "runbook_url: docs/runbooks/"
_DASHBOARD = f"dashboard_url: {GRAFANA}/"
_RUNBOOK_LINK = '"url": "docs/runbooks/'
_PUBLIC, _PRIVATE = 0o666, paths.FILE_MODE  # less the umask: Grafana is another user


@dataclass(frozen=True, slots=True)
class Stack:
    """What the files are made for.

    Attributes:
        directory: where they go, absolute.
        prometheus: URL of Prometheus, by which Grafana and readers of alerts reach it.
        alertmanager: URL of the Alertmanager that Prometheus alerts; "" is none.
        discovered: glob patterns of the files in which daemons announce themselves.
        targets: HOST:PORT of further daemons.
        webhook: URL that our own Alertmanager notifies; "" is none.
        runbook_base: what stands before `/<alert>.md` in the alerts.
        grafana: URL of Grafana, where the alerts lead to the dashboard.
        http: how Prometheus asks the daemons: keys of a scrape_config; {}: plain HTTP.
    """

    directory: Path
    prometheus: str
    alertmanager: str
    discovered: tuple[str, ...]
    targets: tuple[str, ...]
    webhook: str
    runbook_base: str
    grafana: str
    http: Mapping[str, Mapping[str, str]]

    def files(self) -> dict[str, str]:
        """Return the text of each file by its path below the directory."""
        stack = _stack()
        provisioning = "provisioning/dashboards/ddpprobe.yml"
        sources = "provisioning/datasources/ddpprobe.yml"
        dashboards = self.directory / "grafana" / "dashboards"
        target_files = [str(self.directory / "targets" / "*.json"), *self.discovered]
        out = {
            PROMETHEUS: _replaced(
                stack / "prometheus/prometheus.yml",
                {
                    _RULE_FILES: json.dumps([str(self.directory / RULES)]),
                    _TARGET_FILES: json.dumps(target_files),
                    _ALERTMANAGERS: json.dumps(self._alertmanagers()),
                    _JOB: _JOB
                    + "".join(
                        f"    {name}: {json.dumps(said)}\n" for name, said in self.http.items()
                    ),
                },
            ),
            ALERTMANAGER: _replaced(
                stack / "alertmanager/alertmanager.yml",
                {_NO_WEBHOOK: f"webhook_configs: {json.dumps(self._webhooks())}"},
            ),
            TARGETS: _replaced(stack / "prometheus" / TARGETS),
            RULES: _replaced(
                stack / RULES,
                {
                    _RUNBOOK: f"runbook_url: {self.runbook_base.rstrip('/')}/",
                    _DASHBOARD: f"dashboard_url: {self.grafana.rstrip('/')}/",
                },
            ),
            f"grafana/{provisioning}": _replaced(
                stack / provisioning, {_PROVISIONED: json.dumps(str(dashboards))}
            ),
            f"grafana/{sources}": _replaced(stack / sources, {_SOURCE: self.prometheus}),
        }
        if self.targets:
            # Those that announce themselves say it for themselves.
            labels = {"__scheme__": "https"} if "tls_config" in self.http else {}
            out[TARGETS] = (
                json.dumps([{"targets": self.targets, "labels": labels}], indent=2) + "\n"
            )
        runbooks = json.dumps(f"{self.runbook_base.rstrip('/')}/")[:-1]
        for board in sorted((stack / "dashboards").glob("*.json")):
            text = _replaced(board, {_RUNBOOK_LINK: f'"url": {runbooks}'})
            out[f"grafana/dashboards/{board.name}"] = text
        for page in sorted(_runbooks(stack).glob("*.md")):
            out[f"{RUNBOOKS}/{page.name}"] = _replaced(page)
        return out

    def _alertmanagers(self) -> list[dict[str, Any]]:
        if not self.alertmanager:
            return []
        url = urlsplit(self.alertmanager)
        found = {"scheme": url.scheme, "static_configs": [{"targets": [url.netloc]}]}
        return [found | ({"path_prefix": url.path} if url.path.strip("/") else {})]

    def _webhooks(self) -> list[dict[str, str]]:
        return [{"url": self.webhook}] if self.webhook else []


def put(directory: Path, texts: Mapping[str, str], *, force: bool) -> dict[str, str]:
    """Write files into a directory; return what became of each.

    "written": it was not there; "updated": it was as an earlier `up` wrote it, or `force`;
    "unchanged": it says the same; "kept": it is somebody else's work.
    """
    before, state, now = _read(directory / WRITTEN), {}, {}
    for name, text in texts.items():
        path, data = directory / name, text.encode()
        current = path.read_bytes() if path.exists() else None
        ours = current is None or force or before.get(name) == checksum(current)
        if current == data:
            state[name] = "unchanged"
        elif ours:
            state[name] = "written" if current is None else "updated"
            # A webhook's URL is often the key to a channel.
            _write(path, data, _PRIVATE if name == ALERTMANAGER else _PUBLIC)
        else:
            state[name] = "kept"
            continue
        now[name] = checksum(data)
    _write(directory / WRITTEN, (json.dumps(now, indent=1) + "\n").encode(), _PUBLIC)
    return state


def remembered(directory: Path) -> dict[str, Any]:
    """Return the options of the last `up` in this directory, {} if there was none."""
    return _read(directory / OPTIONS)


def remember(directory: Path, options: Mapping[str, Any]) -> None:
    """Keep the options for the next `up`; the webhook's URL is nobody else's business."""
    _write(directory / OPTIONS, (json.dumps(options, indent=1) + "\n").encode(), _PRIVATE)


def checksum(data: bytes) -> str:
    """Return what a file is known by."""
    return hashlib.sha256(data).hexdigest()


def _stack() -> Path:
    """Return where the files are: in the package, or, in a checkout, beside it."""
    package = Path(__file__).parents[1]
    inside = package / "stack"
    return inside if inside.is_dir() else package.parent / "grafana"


def _runbooks(stack: Path) -> Path:
    inside = stack / RUNBOOKS
    return inside if inside.is_dir() else stack.parent / "docs" / RUNBOOKS


def _replaced(path: Path, texts: Mapping[str, str] | None = None) -> str:
    text = path.read_text(encoding="utf-8")
    for old, new in (texts or {}).items():
        if old not in text:
            msg = f"{path} does not say {old!r}"
            raise ValueError(msg)
        text = text.replace(old, new)
    return text


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # nothing is known
    return found if isinstance(found, dict) else {}


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with paths.replacing(path, mode=mode) as fd:
        paths.write_all(fd, [data])
