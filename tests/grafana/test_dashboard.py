"""The dashboard is the one of the code, keeps its rules, and shows data of a real Prometheus."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpprobe.daemon.server import Server
from ddpprobe.metrics.labels import label_value
from ddpprobe.metrics.render import Exposition, render
from ddpprobe.metrics.table import METRICS
from ddpprobe.records.node_view import NodeView
from ddpprobe.records.step import Site

from .. import prometheus_harness

Prometheus, until = prometheus_harness.Prometheus, prometheus_harness.until
DASHBOARD, TREE = prometheus_harness.DASHBOARD, prometheus_harness.TREE
PANELS, QUERIES = prometheus_harness.PANELS, prometheus_harness.QUERIES

ROOT = Path(__file__).parents[2]
GENERATED = (
    "grafana/dashboards/ddpprobe-overview.json",
    "grafana/rules/ddpprobe.yml",
    "docs/reference/metrics.md",
    "docs/reference/detectors.md",
)
# Prometheus makes these itself for every target.
PROMETHEUS_OWN = {"scrape_duration_seconds", "scrape_samples_scraped"}
# Panels whose queries may return nothing; their descriptions must say so.
EMPTY_IS_GOOD = {"Anomalies", "First failure", "Loss scale", "Origin of non-finite elements"}


def test_the_generated_files_are_those_of_the_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grafana.build", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for name in GENERATED:
        made, committed = (tmp_path / name).read_bytes(), (ROOT / name).read_bytes()
        assert made == committed, f"{name} is stale: run `python -m grafana.build`"


def test_the_dashboard_loads_in_grafana_11() -> None:
    assert TREE["schemaVersion"] == 39
    text = DASHBOARD.read_text()
    assert '"footer"' not in text
    for variable in TREE["templating"]["list"]:
        assert not [k for k in variable if k.startswith("auto")]
    assert [link for link in TREE["links"] if "placement" in link] == []


def test_every_panel_explains_itself() -> None:
    for panel in PANELS:
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    for title in EMPTY_IS_GOOD:
        text = next(p["description"] for p in PANELS if p["title"] == title)
        assert "Empty is good" in text, title


def test_ids_are_stable_and_unique() -> None:
    ids = [p["id"] for p in PANELS] + [p["id"] for p in TREE["panels"] if p["type"] == "row"]
    assert len(set(ids)) == len(ids)
    assert [p["id"] for p in PANELS][:3] == [1, 2, 3]
    assert TREE["uid"] == "ddpprobe-overview"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_variables_come_in_order_and_reach_every_query() -> None:
    names = [v["name"] for v in TREE["templating"]["list"]]
    assert names == ["datasource", "job", "node", "rank"]
    for variable in TREE["templating"]["list"][1:]:
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (
            True,
            True,
            ".*",
        )
        assert (variable["sort"], variable["refresh"]) == (3, 2)
    for title, target in QUERIES:
        assert target["datasource"]["uid"] == "${datasource}", title
        for selector in re.findall(r"\w+\{([^}]*)\}", target["expr"]):
            assert 'job=~"$job"' in selector, (title, selector)
            assert 'instance=~"$node"' in selector, (title, selector)


def test_every_metric_in_a_query_exists_and_counters_are_inside_rates() -> None:
    table = {m.name: m for m in METRICS}
    rest = [v["definition"] for v in TREE["templating"]["list"] if v["type"] == "query"]
    rest += [a["expr"] for a in TREE["annotations"]["list"] if "expr" in a]
    for expr in [t["expr"] for _, t in QUERIES] + rest:
        for name in re.findall(r"(\w+)\{|\((ddpprobe_\w+),", expr):
            metric = name[0] or name[1]
            assert metric in table or metric in PROMETHEUS_OWN, (metric, expr)
    for title, target in QUERIES:
        for metric in re.findall(r"(ddpprobe_\w+_total)\{", target["expr"]):
            if (title, metric) == ("Steps", "ddpprobe_steps_total"):
                continue  # the verdict strip shows the count itself
            inside = rf"(rate|increase)\({metric}\{{[^}}]*\}}\[\$__(rate_interval|range)\]\)"
            assert re.search(inside, target["expr"]), (title, metric)


def test_the_provisioning_files_are_valid() -> None:
    folder = ROOT / "grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/ddpprobe.yml").read_text())["datasources"][0]
    assert (source["type"], source["jsonData"]["timeInterval"]) == ("prometheus", "15s")
    provider = yaml.safe_load((folder / "dashboards/ddpprobe.yml").read_text())["providers"][0]
    assert provider["allowUiUpdates"] is False
    example = ROOT / "grafana/prometheus/prometheus.yml"
    done = subprocess.run(
        ["promtool", "check", "config", str(example)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


EVIL = ['"} 1\nfake 2', "a\\", "\ud800", "x\r\ny", "\0", "# {} 1", "\u2028", "z" * 999, ""]
EVIL.append("".join(map(chr, range(1, 32))) + "\x7f\x85\ufeff")


def hostile(view: NodeView) -> NodeView:
    """Return a view full of names that try to break the exposition."""
    assert view.merged is not None
    sites = tuple(Site(name, "output") for name in EVIL)
    n = len(sites)
    merged = replace(
        view.merged, sites=sites, counts=view.merged.counts[:n], values=view.merged.values[:n]
    )
    latest = view.exemplars["nonfinite", "page"]
    keys = [(name, "page") for name in EVIL]
    return replace(
        view,
        merged=merged,
        anomalies=dict.fromkeys(keys, 1),
        exemplars={key: replace(latest, module=key[0]) for key in keys},
    )


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, float, float]]:
    """A run of two ranks, scraped as it goes: healthy, then a NaN on rank 1, then its death."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        sample = importlib.import_module("grafana.sample")
    server, exposition, tick = Server("127.0.0.1:0"), Exposition(), threading.Event()
    evil = Server("127.0.0.1:0")
    view = hostile(list(sample.views())[-1])
    evil.publish(render(view, False), render(view, True))
    folder = tmp_path_factory.mktemp("prometheus")
    prometheus = Prometheus(folder, ddpprobe=server.start(), hostile=evil.start())
    try:
        assert until(prometheus.ready)
        start = time.time()
        for view in sample.views():
            server.publish(exposition.render(view, False), exposition.render(view, True))
            tick.wait(0.75)  # the run's own pace
        assert until(
            lambda: bool(
                prometheus.get("query", query="ddpprobe_first_failure_timestamp_seconds")["result"]
            )
        )
        yield prometheus, start, time.time()
    finally:
        prometheus.close()
        server.stop()
        evil.stop()


@pytest.mark.parametrize(("title", "target"), QUERIES)
def test_every_query_returns_data(
    scraped: tuple[Prometheus, float, float], title: str, target: dict[str, Any]
) -> None:
    prometheus, start, end = scraped
    result = prometheus.panel(target, start, end)
    # The sample has a NaN and a death, so not even the panels that may be empty are.
    assert result, title
    for label in prometheus_harness.labels_of(target):
        assert all(label in row["metric"] for row in result), (title, label)


def test_the_verdict_strip_is_right(scraped: tuple[Prometheus, float, float]) -> None:
    prometheus, start, end = scraped

    def now(title: str) -> float:
        target = next(t for name, t in QUERIES if name == title)
        rows = prometheus.panel(target, start, end, instant=True)
        assert len(rows) == 1, title
        return float(rows[0]["value"][1])

    assert now("Ranks lost") == 1
    assert now("Non-finite elements") >= 512
    assert now("Anomalies, page") >= 1


def test_annotations_and_variables_find_something(
    scraped: tuple[Prometheus, float, float],
) -> None:
    prometheus, start, end = scraped
    for annotation in prometheus_harness.ANNOTATIONS:
        assert prometheus.panel(annotation, start, end), annotation["expr"]
    for variable in prometheus_harness.VARIABLES:
        assert prometheus.variable(variable, start, end), variable["definition"]


def test_the_exemplar_arrives(scraped: tuple[Prometheus, float, float]) -> None:
    prometheus, start, end = scraped
    labels = prometheus.exemplars("ddpprobe_anomalies_total", start - 5, end + 5)
    assert {"step": "32", "fqn": "blocks.2.mlp", "kind": "output", "rank": "1"} in labels


def test_hostile_names_are_scraped_with_their_exemplars(
    scraped: tuple[Prometheus, float, float],
) -> None:
    prometheus, start, end = scraped
    assert prometheus.get("query", query='up{job="hostile"}')["result"][0]["value"][1] == "1"
    query = 'ddpprobe_anomalies_total{job="hostile"}'
    shown = prometheus.get("query", query=query)["result"]
    assert {label_value(name) for name in EVIL if name} <= {
        row["metric"].get("detector", "") for row in shown
    }
    assert len(prometheus.exemplars(query, start - 5, end + 5)) == len(EVIL)


def test_the_alerts_fire_in_prometheus(scraped: tuple[Prometheus, float, float]) -> None:
    prometheus, _, _ = scraped

    def firing() -> set[str]:
        alerts = prometheus.get("alerts")["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    assert until(lambda: {"DdpprobeFirstCause", "DdpprobeRunLost"} <= firing()), firing()
    # They yield to it, and to the head.
    assert not {"DdpprobeRankDead", "DdpprobeNonFinite"} & firing()


def test_prometheus_evaluates_every_rule_without_an_error(
    scraped: tuple[Prometheus, float, float],
) -> None:
    prometheus, _, _ = scraped

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    assert until(lambda: "unknown" not in {rule["health"] for rule in rules()})
    assert [rule for rule in rules() if rule["health"] != "ok"] == []
