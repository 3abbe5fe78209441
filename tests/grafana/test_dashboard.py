"""The dashboards are those of the code, keep their rules, and show data of a real Prometheus."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpprobe.daemon.server import Server
from ddpprobe.metrics.labels import label_value
from ddpprobe.metrics.render import Exposition
from ddpprobe.metrics.table import METRICS
from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.node_view import FirstFailure, NodeView
from ddpprobe.records.step import Site

from .. import prometheus_harness

Prometheus, until = prometheus_harness.Prometheus, prometheus_harness.until
BOARDS, QUERIES = prometheus_harness.BOARDS, prometheus_harness.QUERIES
VARIABLES, panels_of = prometheus_harness.VARIABLES, prometheus_harness.panels_of

ROOT = Path(__file__).parents[2]
GENERATED = (
    *(f"grafana/dashboards/{board}.json" for board in BOARDS),
    "grafana/rules/ddpprobe.yml",
    "docs/reference/metrics.md",
    "docs/reference/detectors.md",
)
# Prometheus makes these itself for every target.
PROMETHEUS_OWN = {"scrape_duration_seconds", "scrape_samples_scraped", "up"}
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "grafana/rules/ddpprobe.yml").read_text())["groups"]
    for rule in group["rules"]
]
ONE_RUN = {"datasource": "datasource", "job": "chosen", "run": "chosen", "node": "filtered"}
VARIABLES_OF = {
    "ddpprobe-run": {**ONE_RUN, "rank": "filtered", "directory": "chosen"},
    "ddpprobe-ranks": {**ONE_RUN, "rank": "filtered", "directory": "chosen"},
    "ddpprobe-modules": {
        **ONE_RUN, "directory": "chosen", "stat": "listed", "kind": "chosen", "window": "listed",
        "module": "chosen",
    },
    "ddpprobe-fleet": {"datasource": "datasource", "job": "filtered"},
}  # fmt: skip
# Counts themselves, not how fast they rise.
COUNTS_SHOWN = {
    "Step": "ddpprobe_steps_total",
    "Started again": "ddpprobe_restarts_total",
    "The worst ranks": "ddpprobe_rank_anomalies_total",
    "Runs, the worst first": "ddpprobe_steps_total",
}


def test_the_generated_files_are_those_of_the_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grafana.build", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for name in GENERATED:
        made, committed = (tmp_path / name).read_bytes(), (ROOT / name).read_bytes()
        assert made == committed, f"{name} is stale: run `python -m grafana.build`"


def test_there_are_four() -> None:
    assert set(BOARDS) == set(VARIABLES_OF)


@pytest.mark.parametrize("board", BOARDS)
def test_a_dashboard_loads_in_grafana_11(board: str) -> None:
    tree = BOARDS[board]
    assert (tree["uid"], tree["schemaVersion"], tree["tags"]) == (board, 39, ["ddpprobe"])
    assert '"footer"' not in str(tree)
    for variable in tree["templating"]["list"]:
        assert not [k for k in variable if k.startswith("auto")]
    assert [link for link in tree["links"] if "placement" in link] == []


@pytest.mark.parametrize("board", BOARDS)
def test_every_panel_explains_itself(board: str) -> None:
    for panel in panels_of(board):
        assert panel["title"]
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["type"] == "text" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_the_commands_of_a_run_are_seen_whatever_the_length_of_its_path() -> None:
    [panel] = [p for p in panels_of("ddpprobe-run") if p["title"] == "What to type"]
    content = panel["options"]["content"]
    assert content.count("$directory") == 1
    rows = content.replace("$directory", "x" * 150).strip("`\n").splitlines()
    width = 6 * panel["gridPos"]["w"]  # characters of a line, on a screen of 1,400 pixels
    assert sum(-(-len(row) // width) for row in rows) <= 8


def test_names_of_many_runs_hide_no_graph() -> None:
    graphs = [p for p in panels_of("ddpprobe-fleet") if p["type"] == "timeseries"]
    assert len(graphs) == 3
    for panel in graphs:
        assert panel["options"]["legend"]["showLegend"] is False
        assert panel["options"]["tooltip"]["mode"] == "multi"
        assert "for the names" in panel["description"]
        names = [t["legendFormat"] for t in panel["targets"] if "{{" in t["legendFormat"]]
        assert names == ["{{run}} ({{job}})"]  # what is cut off is cut off after


@pytest.mark.parametrize("board", BOARDS)
def test_ids_are_unique_and_panels_do_not_overlap(board: str) -> None:
    panels = panels_of(board)
    ids = [p["id"] for p in panels] + [
        p["id"] for p in BOARDS[board]["panels"] if p["type"] == "row"
    ]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("board", BOARDS)
def test_the_variables_come_in_order(board: str) -> None:
    def kind(variable: dict[str, Any]) -> str:
        if variable["type"] != "query":
            return {"custom": "listed"}.get(variable["type"], variable["type"])
        assert variable["refresh"] == 2, variable["name"]  # on every change of the time range
        several = (variable["multi"], variable["includeAll"])
        return {(True, True): "filtered", (False, False): "chosen"}[several]

    found = {v["name"]: kind(v) for v in BOARDS[board]["templating"]["list"]}
    assert list(found.items()) == list(VARIABLES_OF[board].items())


@pytest.mark.parametrize("board", BOARDS)
def test_every_query_is_of_what_the_variables_choose(board: str) -> None:
    """Two runs never mix: job and run are single values, and in every selector."""
    matchers = ['job="$job"', 'run="$run"', 'instance=~"$node"']
    for name, title, target in QUERIES:
        if name != board:
            continue
        assert target["datasource"]["uid"] == "${datasource}", title
        for selector in re.findall(r"\w+\{([^}]*)\}", target["expr"]):
            for matcher in matchers if board != "ddpprobe-fleet" else ['job=~"$job"']:
                assert matcher in selector, (title, selector)


def expressions() -> list[str]:
    """Return every expression of the dashboards, with each value of a listed variable."""
    found = [t["expr"] for _, _, t in QUERIES] + [v["definition"] for _, v in VARIABLES]
    found += [
        a["expr"] for t in BOARDS.values() for a in t["annotations"].get("list", []) if "expr" in a
    ]
    listed = {
        v["name"]: v["query"].split(",")
        for t in BOARDS.values()
        for v in t["templating"]["list"]
        if v["type"] == "custom"
    }
    return [expr.replace("$stat", stat) for expr in found for stat in listed["stat"][: len(expr)]]


def test_every_metric_in_a_query_exists() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    known = {m.name for m in METRICS} | PROMETHEUS_OWN | recorded
    for expr in expressions():
        for found in re.findall(r"([a-zA-Z_:][\w:]*)\{|\((ddpprobe_\w+),", expr):
            assert (found[0] or found[1]) in known, (found, expr)


def test_counters_are_inside_rates() -> None:
    for _, title, target in QUERIES:
        for metric in re.findall(r"(ddpprobe_\w+_total)\{", target["expr"]):
            inside = rf"(rate|increase)\({metric}\{{[^}}]*\}}\[\$__(rate_interval|range)\]\)"
            there = re.search(inside, target["expr"]) is not None
            assert there or COUNTS_SHOWN.get(title) == metric, (title, metric)


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


# Neither ends nor begins again within it.
NOT_IN_THE_SAMPLE = {"Ends", "Restarts"}
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


HANG = FirstCauseEvent(detector="rank_lost", step=12, rank=0, phase="forward", time_ns=10**18)
RANKS = 100  # more than are drawn by line
VAST, NODE_RANKS = 1032, 8  # more than have a series each of everything, and those of one node


def others(view: NodeView) -> dict[str, NodeView]:
    """Return more runs at the same moment, by their names; nobody knows a cause there at last."""
    unknown = replace(view, first_failure=None, first_cause=None, anomalies={}, exemplars={})
    rank = view.ranks[0]
    return {
        "large": replace(
            unknown,
            ranks=tuple(replace(rank, rank=r) for r in range(RANKS)),
            stuck={7: "forward"},
        ),
        "vast": replace(
            unknown,
            world_size=VAST,
            ranks=tuple(replace(rank, rank=r) for r in range(VAST - NODE_RANKS, VAST)),
        ),
        "small": replace(unknown, anomalies={("output_jump", "warn"): int(rank.steps > 12)}),
        "lost": replace(unknown, state="crashed"),
        "killed": replace(
            unknown, state="crashed", first_failure=FirstFailure(1, "SIGKILL", view.time_ns)
        ),
        "again": replace(
            unknown,
            attempt=int(rank.steps > 24),
            first_failure=FirstFailure(1, "SIGKILL", view.time_ns)
            if 12 < rank.steps <= 24
            else None,
        ),
        "hung": replace(unknown, state="hung", stuck={0: "forward"}),
        "passed": replace(
            unknown,
            first_cause=HANG if 12 < rank.steps <= 24 else None,
            anomalies={("rank_lost", "page"): int(rank.steps > 12)},
        ),
    }


def history(target: str, now: float) -> str:
    """Return an hour in OpenMetrics, up to a minute ago, of series that `target` goes on with."""
    lines = []
    for name, labels in (
        ("ddpprobe_grad_norm", ',rank="0"'),
        ("ddpprobe_global_grad_norm", ""),
        ("ddpprobe_site_rms", f',fqn="{prometheus_harness.MODULE}",kind="output"'),
    ):
        series = f'{name}{{job="ddpprobe",instance="{target}"{labels}}}'
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{series} 2 {now - ago}" for ago in range(3600, 60, -60)]
    return "\n".join([*lines, "# EOF\n"])


@dataclass(frozen=True)
class Scraped:
    """A Prometheus and what it saw: Unix seconds of the run's begin, its fault and the end."""

    prometheus: Prometheus
    start: float
    bad: float
    end: float


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A run of two ranks, scraped as it goes: healthy, then a NaN on rank 1, then its death.

    Beside it, eight runs of one job without a known cause, and one with hostile names.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        sample = importlib.import_module("grafana.sample")
    servers: dict[str, Server] = {}
    expositions: defaultdict[str, Exposition] = defaultdict(Exposition)
    tick = threading.Event()

    def show(name: str, view: NodeView) -> None:
        made = expositions[name]
        servers[name].publish(made.render(view, False), made.render(view, True))

    def serve(name: str, view: NodeView) -> str:
        servers[name] = Server("127.0.0.1:0")
        show(name, view)
        return servers[name].start()

    first, *_, last = sample.views()
    target = serve("sample", first)
    runs = {name: serve(name, view) for name, view in others(first).items()}
    folder = tmp_path_factory.mktemp("prometheus")
    prometheus = Prometheus(
        folder, history=history(target, time.time()),
        ddpprobe=target, hostile=serve("hostile", hostile(last)), others=runs,
    )  # fmt: skip
    try:
        assert until(prometheus.ready)
        # It takes seconds until it scrapes for the first time, and what rose before is no rise.
        assert until(lambda: len(prometheus.now("ddpprobe_job_info")) == len(servers), 120)
        start, bad = time.time(), 0.0
        for view in sample.views():
            bad = bad or (time.time() if view.first_cause else 0.0)
            for name, each in {"sample": view, **others(view)}.items():
                show(name, each)
            tick.wait(0.75)  # the run's own pace
        asked = (
            "ddpprobe_first_failure_timestamp_seconds",
            f'count(ddpprobe_rank_info{{run="large"}}) == {RANKS}',
            'ddpprobe_job_state{run="lost"}',
            'ddpprobe_rank_stuck{run="hung"}',
            'ddpprobe_first_failure_timestamp_seconds{run="killed"}',
            'increase(ddpprobe_anomalies_total{run="small",detector="output_jump"}[1m]) > 0',
            'increase(ddpprobe_anomalies_total{run="passed",detector="rank_lost"}[1m]) > 0',
        )
        assert until(lambda: all(prometheus.now(expr) for expr in asked), 120)
        yield Scraped(prometheus, start, bad, time.time())
    finally:
        prometheus.close()
        for server in servers.values():
            server.stop()


def situations(scraped: Scraped) -> list[dict[str, Any]]:
    """Return what to look at: the whole run, its beginning when it was well, and the others."""
    whole = {"start": scraped.start, "end": scraped.end}
    well = {"start": scraped.start, "end": scraped.bad - 0.5}
    return [
        whole,
        well,
        *(
            {**whole, "job": "others", "run": run}
            for run in ("large", "vast", "small", "lost", "killed", "again", "hung", "passed")
        ),
    ]


@pytest.mark.parametrize(("board", "title", "target"), QUERIES)
def test_every_query_returns_data_of_some_run(
    scraped: Scraped, board: str, title: str, target: dict[str, Any]
) -> None:
    asked = (scraped.prometheus.panel(target, **each) for each in situations(scraped))
    found = next(filter(None, asked), [])
    assert found, (board, title)
    for label in prometheus_harness.labels_of(target):
        assert all(label in row["metric"] for row in found), (title, label)


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), target["legendFormat"])


def now(scraped: Scraped, board: str, title: str, **chosen: Any) -> list[tuple[str, float]]:
    """Return (name, value) of what a panel shows at the end: (legend, number) of each series."""
    times = {"start": scraped.start, "end": scraped.end, **chosen}
    return [
        (legend(target, row["metric"]), float(row["value"][1]))
        for name, panel, target in QUERIES
        if (name, panel) == (f"ddpprobe-{board}", title)
        for row in scraped.prometheus.panel(target, instant=True, **times)
    ]


def test_the_verdict_says_what_where_and_when(scraped: Scraped) -> None:
    [(words, when)] = now(scraped, "run", "Verdict")
    assert words == "nonfinite in step 32, rank 1, blocks.2.mlp (output), forward"
    assert scraped.start < when / 1000 < scraped.end
    [(words, _)] = now(scraped, "run", "Verdict", end=scraped.bad - 0.5)
    assert words == "Nothing wrong was found"


def test_what_went_wrong_without_a_first_cause_is_not_called_well(scraped: Scraped) -> None:
    for run, said in (
        ("hung", "All wait for rank 0 (forward)"),
        ("killed", "Rank 1 was the first to fail (SIGKILL)"),
        ("again", "It goes on; in an earlier attempt rank 1 was the first to fail (SIGKILL)"),
        ("lost", "It did not end well, and the cause is not known"),
        ("small", "warning: output_jump"),
        ("passed", "warning: rank_lost"),  # it went on: history, and no first cause
    ):
        [(words, when)] = now(scraped, "run", "Verdict", job="others", run=run)
        assert words == said
        assert scraped.start - 60 < when / 1000 < scraped.end


def test_a_hang_that_is_over_was_a_fault_and_is_no_verdict(scraped: Scraped) -> None:
    job = {"job": "others", "run": "passed"}
    faults = [
        row["metric"]["detector"]
        for _, title, target in QUERIES
        if title == "Faults, in order of time"
        for row in scraped.prometheus.panel(target, scraped.start, scraped.end, **job)
    ]
    assert set(faults) == {"rank_lost"}
    verdicts = [
        row["metric"]
        for _, title, target in QUERIES
        if title == "Runs, the worst first" and "verdict" in target["expr"]
        for row in scraped.prometheus.panel(target, scraped.start, scraped.end, job="others")
    ]
    assert verdicts == []


def test_the_numbers_below_it_are_right(scraped: Scraped) -> None:
    [(_, lost)] = now(scraped, "run", "Ranks lost")
    [(_, elements)] = now(scraped, "run", "Non-finite elements")
    [(_, step)] = now(scraped, "run", "Step")
    assert (lost, step) == (1, 48)
    assert elements >= 512


def test_a_run_of_many_ranks_is_drawn_in_bands_and_a_few_lines(scraped: Scraped) -> None:
    for board in ("run", "ranks"):
        for panel in panels_of(f"ddpprobe-{board}"):
            if panel["type"] == "timeseries":
                shown = now(scraped, board, panel["title"], job="others", run="large")
                assert len(shown) <= 12, panel["title"]
    lines = now(scraped, "ranks", "Resident memory", job="others", run="large")
    assert [name for name, _ in lines[:3]] == ["lowest", "median", "highest"]
    assert len(lines) == 3 + 5
    lines = now(scraped, "ranks", "Resident memory", job="others", run="small")
    assert [name for name, _ in lines] == ["rank 0", "rank 1"]


def test_of_a_vast_run_a_line_is_of_a_node_where_the_ranks_are_joined(scraped: Scraped) -> None:
    of_nodes = ("Resident memory", "CPU", "Overhead of ddpprobe")
    for title in of_nodes:
        lines = now(scraped, "ranks", title, job="others", run="vast")
        assert [name for name, _ in lines] == [f"rank {VAST - NODE_RANKS}-{VAST - 1}"], title
    lines = now(scraped, "ranks", "Own work per step", job="others", run="vast")
    assert len(lines) == NODE_RANKS


def test_runs_of_one_job_do_not_mix(scraped: Scraped) -> None:
    [(_, ranks)] = scraped.prometheus.now('count(ddpprobe_rank_info{job="others"})')
    assert ranks == RANKS + NODE_RANKS + 6 * 2
    for run, lost in (("large", 0), ("small", 1)):
        [(_, shown)] = now(scraped, "run", "Ranks lost", job="others", run=run)
        assert shown == lost


def test_the_fleet_has_a_line_per_run_and_counts_them(scraped: Scraped) -> None:
    rows = now(scraped, "fleet", "State by run", job=".*")
    assert len(rows) == 10
    [(_, failed)] = now(scraped, "fleet", "Failed or hung", job=".*")
    assert failed == 3
    [verdict] = [
        row["metric"]["verdict"]
        for _, title, target in QUERIES
        if title == "Runs, the worst first" and "verdict" in target["expr"]
        for row in scraped.prometheus.panel(target, scraped.start, scraped.end)
    ]
    assert verdict == "nonfinite, blocks.2.mlp, rank 1, forward"


def test_the_heat_map_is_in_execution_order(scraped: Scraped) -> None:
    [target] = panels_of("ddpprobe-modules")[0]["targets"]
    rows = scraped.prometheus.panel(target, scraped.start, scraped.end)
    names = [row["metric"]["fqn"] for row in rows]
    assert names == [
        "embed",
        *(f"blocks.{i}.{m}" for i in range(4) for m in ("attn", "mlp")),
        "head",
    ]


def test_annotations_and_variables_find_something(scraped: Scraped) -> None:
    for annotation in prometheus_harness.ANNOTATIONS:
        found = [scraped.prometheus.panel(annotation, **each) for each in situations(scraped)]
        assert any(found) or annotation["name"] in NOT_IN_THE_SAMPLE, annotation["expr"]
    for _, variable in VARIABLES:
        job = {"job": "others"} if variable["name"] == "run" else {}
        found = scraped.prometheus.variable(variable, scraped.start, scraped.end, **job)
        assert found, variable["definition"]


def test_the_exemplar_arrives(scraped: Scraped) -> None:
    prometheus, start, end = scraped.prometheus, scraped.start, scraped.end
    labels = prometheus.exemplars("ddpprobe_anomalies_total", start - 5, end + 5)
    assert {"step": "32", "fqn": "blocks.2.mlp", "kind": "output", "rank": "1"} in labels


def test_hostile_names_are_scraped_with_their_exemplars(
    scraped: Scraped,
) -> None:
    prometheus, start, end = scraped.prometheus, scraped.start, scraped.end
    assert prometheus.get("query", query='up{job="hostile"}')["result"][0]["value"][1] == "1"
    query = 'ddpprobe_anomalies_total{job="hostile"}'
    shown = prometheus.get("query", query=query)["result"]
    assert {label_value(name) for name in EVIL if name} <= {
        row["metric"].get("detector", "") for row in shown
    }
    assert len(prometheus.exemplars(query, start - 60, end + 5)) == len(EVIL)


def test_the_alerts_fire_in_prometheus(scraped: Scraped) -> None:
    prometheus = scraped.prometheus

    def firing() -> set[str]:
        alerts = prometheus.get("alerts")["alerts"]
        ours = [a for a in alerts if a["labels"]["job"] == "ddpprobe"]
        return {a["labels"]["alertname"] for a in ours if a["state"] == "firing"}

    assert until(lambda: {"DdpprobeFirstCause", "DdpprobeRunLost"} <= firing()), firing()
    # They yield to it, and to the head.
    assert not {"DdpprobeRankDead", "DdpprobeNonFinite"} & firing()


def test_prometheus_evaluates_every_rule_without_an_error(
    scraped: Scraped,
) -> None:
    prometheus = scraped.prometheus

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    assert until(lambda: "unknown" not in {rule["health"] for rule in rules()})
    assert [rule for rule in rules() if rule["health"] != "ok"] == []
