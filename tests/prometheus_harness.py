"""A real Prometheus, and the queries of the committed dashboard put to it as Grafana would."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from .waiting import PATIENCE, deadline

ROOT = Path(__file__).parent.parent
DASHBOARDS = sorted((ROOT / "grafana/dashboards").glob("*.json"))
BOARDS: dict[str, dict[str, Any]] = {p.stem: json.loads(p.read_text()) for p in DASHBOARDS}


def panels_of(board: str) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, those in folded rows included."""
    return [
        each
        for panel in BOARDS[board]["panels"]
        for each in (panel, *panel.get("panels", []))
        if each["type"] != "row"
    ]


PANELS = [(b, p) for b in BOARDS for p in panels_of(b)]
QUERIES = [(b, p["title"], t) for b, p in PANELS for t in p.get("targets", [])]
ANNOTATIONS = [a for a in BOARDS["ddpprobe-run"]["annotations"]["list"] if "expr" in a]
VARIABLES = [
    (b, v) for b in BOARDS for v in BOARDS[b]["templating"]["list"] if v["type"] == "query"
]
JOB = "ddpprobe"
MODULE = "blocks.1.mlp"  # of every model that the dashboards are shown of


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Wait until it holds; False if it does not before the time is up."""
    late = deadline(seconds)
    while not condition():
        if time.monotonic() > late:
            return False
        time.sleep(0.1)
    return True


class Prometheus:
    """A real one, that scrapes every second and has the repository's alert rules.

    Args:
        folder: for its files, empty.
        history: OpenMetrics text of what it knows from before.
        more: by the name of the job what else its scrape_config says.
        targets: by the name of the job its target, or the target of each run by its label.
    """

    def __init__(
        self, folder: Path, *, history: str = "", more: Mapping[str, Mapping[str, Any]] = {},
        **targets: str | Mapping[str, str],
    ) -> None:  # fmt: skip
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "grafana/rules/ddpprobe.yml")],
            "scrape_configs": [
                {
                    "job_name": job,
                    "sample_limit": 20000,
                    "static_configs": [{"targets": [target]}]
                    if isinstance(target, str)
                    else [{"targets": [t], "labels": {"run": run}} for run, t in target.items()],
                    **more.get(job, {}),
                }
                for job, target in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        if history:
            (folder / "history.om").write_text(history)
            make = ["promtool", "tsdb", "create-blocks-from", "openmetrics"]
            words = [*make, "--max-block-duration=24h", f"{folder}/history.om", f"{folder}/data"]
            subprocess.run(words, check=True, capture_output=True)
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                "--web.listen-address=127.0.0.1:0",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @functools.cached_property
    def url(self) -> str:
        """Where it listens: the system chooses the port, and the log says which."""
        log = Path(self._log.name)
        found: list[str] = []

        def said() -> bool:
            found[:] = re.findall(r'msg="Listening on".* address=(\S+)', log.read_text())
            return bool(found)

        assert until(said), log.read_text()
        return f"http://{found[0]}"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10 * PATIENCE) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{parameters}: {error.read().decode()}")

    def now(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return (labels, value) of every series of an instant query."""
        rows = self.get("query", query=expr)["result"]
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def exemplars(self, expr: str, start: float, end: float) -> list[dict[str, str]]:
        """Return the labels of the exemplars in a time range."""
        data = self.get("query_exemplars", query=expr, start=str(start), end=str(end))
        return [e["labels"] for series in data for e in series["exemplars"]]

    def between(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Return the series of a query over a time range, a point a second."""
        times = {"start": str(start), "end": str(end), "step": "1"}
        return list(self.get("query_range", query=expr, **times)["result"])

    def panel(
        self, target: dict[str, Any], start: float, end: float, *, instant: bool = False,
        **chosen: str,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Ask one query of a panel, as Grafana would for this time range; or only for its end."""
        expr = filled_in(target["expr"], start, end, **chosen)
        if instant or target.get("instant"):
            return list(self.get("query", query=expr, time=str(end))["result"])
        return self.between(expr, start, end)

    def variable(
        self, variable: dict[str, Any], start: float, end: float, **chosen: str
    ) -> list[str]:
        """Return the values that a variable of the dashboard can take."""
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert found, variable["definition"]
        match = filled_in(found[1], start, end, **chosen)
        return list(self.get(f"label/{found[2]}/values", **{"match[]": match}))

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10 * PATIENCE) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20 * PATIENCE)
        self._log.close()


def filled_in(expr: str, start: float, end: float, **chosen: str) -> str:
    """Replace Grafana's variables as it would, by default with everything selected.

    Args:
        expr: the expression.
        start: of the shown time, in Unix seconds.
        end: of the shown time.
        chosen: values of the dashboard's own variables.
    """
    values = {
        "__rate_interval": "1m",  # scrapes of a busy machine are seconds apart
        "__range": f"{round(end - start)}s",
        "__interval": "1s",
        "job": JOB,
        "run": "",
        "node": ".*",
        "rank": ".*",
        "stat": "rms",
        "kind": "output",
        "window": "5m",
        "module": MODULE,
        **chosen,
    }
    return re.sub(r"\$([a-z_]+)", lambda match: values[match[1]], expr)


# Labels of a legend that may be absent: what of a first cause is not known, the step of a hang, and
# a target without discovery's label.
OPTIONAL = {"who", "how", "where", "what", "when", "at", "run"}


def labels_of(target: dict[str, Any]) -> list[str]:
    """Return the labels that the legend of a query shows and that each of its series must have."""
    found = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
    return [label for label in found if label not in OPTIONAL]
