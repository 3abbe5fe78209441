"""A past run in the formats of others: what they hold is what `Run` says, and tools take it."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import ddpprobe
from ddpprobe.cli import local_server
from ddpprobe.cli.commands.export import SUFFIXES
from ddpprobe.cli.main import main
from ddpprobe.daemon.attempt import Attempt
from ddpprobe.daemon.gather_queue import GatherQueue
from ddpprobe.daemon.liveness import ProcessWatcher
from ddpprobe.daemon.snapshot import Readings, view_of
from ddpprobe.metrics.labels import label_value, run_label
from ddpprobe.metrics.table import METRICS, SERIES_LIMIT
from ddpprobe.reader import long_table as table
from ddpprobe.reader.export import job, openmetrics
from ddpprobe.reader.export.replayed_views import views
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.run import Run
from ddpprobe.reader.selection import EVERY_RANK, Selection
from ddpprobe.records.derived import DERIVED, NOISE_SCALE
from ddpprobe.records.step import COUNTS, STATS, FirstBad, Site, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.format import unescape
from ddpprobe.store.writer import StoreWriter

from ... import made_runs, prometheus_harness
from ...waiting import PATIENCE

START = 1_700_000_000  # seconds; a step each
STEPS, SKIPPED, UNOBSERVED, BAD = 40, 12, 5, 30
ORDERED = 33  # step from which on full tensors were to be kept
EVIL = ['x"} 1\nfake 2', "a\\u0041", "\ud800", "r\ry\0", "=1+1", "#1 {", "z" * 300, ""]
SITES = (
    *(Site(f"blocks.{i}.mlp", kind) for i in range(2) for kind in ("output", "grad_output")),
    Site("blocks.0.mlp.weight", "grad", placement="replicated"),
    Site("pair", "output", "0"),
    Site("pair", "output", "1"),
    *(Site(name, "input") for name in EVIL),
)
OWN_OF_PROMETHEUS = ("scrape_duration_seconds", "scrape_samples_scraped")


def record(rank: int, step: int) -> StepRecord:
    rng = np.random.default_rng([rank, step])
    counts = np.zeros((len(SITES), len(COUNTS)), np.int64)
    counts[:, COUNTS.index("numel")] = 64
    counts[:, -2:] = 1
    values = rng.standard_normal((len(SITES), 4))
    values[:, :2] = np.sort(values[:, :2], axis=1)
    values[:, 3] = 64 * values[:, 3] ** 2
    if step == UNOBSERVED:
        counts[0, [0, -1]], values[0] = 0, (np.inf, -np.inf, 0, 0)
    bad = None
    if step >= BAD and rank == 1:
        counts[1, COUNTS.index("nan")] = 3
        counts[2, COUNTS.index("pos_inf")], values[2] = 64, (np.inf, -np.inf, 0, 0)
        values[3, 3] = np.inf  # a sum of squares that no float holds
        bad = FirstBad(step, 0, "backward", 2, 1, "blocks.0.mlp", "grad_output", "", 3, 0, 0, 64)
    scalars = {
        "loss": math.nan if step > BAD else 3.0 - step / 40 + rank, "grad_norm_local": 1.0 + rank,
        "lr\n": -math.inf if step == 7 else 0.1, "loss_scale": 1024.0,
        "data_seconds": 0.1, "forward_seconds": 0.3, "backward_seconds": 0.4 - rank / 10,
        "optimizer_seconds": 0.1, "probe_seconds": 0.01,
        "sites_expected": float(len(SITES)), "sites_observed": float(len(SITES)),
    }  # fmt: skip
    return made_runs.record(
        rank, step, 1, sites=SITES, counts=counts, values=values, scalars={rank: scalars},
        wall_time_ns=(START + step) * 10**9 + rank, first_bad=bad, skipped=step == SKIPPED,
        digests={},
    )  # fmt: skip


def make(path: Path, steps: int = STEPS) -> Path:
    """A sealed run; rank 1 died at its end."""
    made = made_runs.Made(path)
    for step in range(steps):
        made.write([record(rank, step) for rank in range(2)])
        made.tell(framing.RECORD, made_runs.head_merge([record(rank, step) for rank in range(2)]))
        process = {"resident_bytes": 1e8, "cpu_seconds": step / 2}
        made.tell(framing.SAMPLE, {
            "time_ns": (START + step) * 10**9, "ranks": {"0": process, "1": process},
            "host": {"cpu_ratio": 0.5, "load1": 1.0, "memory_available_bytes": 1e9,
                     "memory_total_bytes": 2e9, "disk_free_bytes": 1e12, "wild": [1]},
        })  # fmt: skip
    made.writer(0).append_json(framing.LIFE, {"event": "closed", "status": "ok"})
    order = {
        "event": "order",
        "number": 0,
        "action": "capture",
        "start": ORDERED,
        "stop": ORDERED + 2,
    }
    made.tell(framing.LIFE, {**order, "cause": "page/1", "reason": "nonfinite"})
    death = {"event": "death", "rank": 1, "signal": "SIGKILL", "step": steps - 1, "first": True}
    made.tell(framing.LIFE, {**death, "time_ns": int((START + steps - 0.5) * 1e9)})
    made.close(cleanly=False)
    writer = StoreWriter(made.run, made_runs.NODE)
    writer.seal()
    writer.close()
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ddpprobe.open(make(tmp_path_factory.mktemp("export") / "run"))


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def do(*words: object) -> tuple[int, str, str]:
        code = main(["export", *map(str, words)])
        return code, *capfd.readouterr()

    return do


Sample = tuple[dict[str, str], float, float]


def samples_of(text: str) -> dict[str, list[Sample]]:
    """Return (labels, value, time) by sample name; strict about the order, names may be hostile.

    The format's reference parser does not read every label value that its own writer escapes.
    """
    found: dict[str, list[Sample]] = {}
    assert text.endswith("\n# EOF\n")
    for name, lines in itertools.groupby(text.split("\n")[:-2], key=lambda s: s.split("{")[0]):
        if name.startswith("#"):
            continue
        assert name not in found, "the samples of a family do not lie together"
        found[name], ended = [], set()
        for labels, group in itertools.groupby(map(LINE.fullmatch, lines), key=lambda m: m[1]):
            assert labels not in ended, "the samples of a series do not lie together"
            ended.add(labels)
            pairs = {k: UNESCAPE.sub(plain, v) for k, v in LABEL.findall(labels)}
            told = [(pairs, float(match[2]), float(match[3])) for match in group]
            times = [time for _, _, time in told]
            assert times == sorted(set(times)), "the samples of a series do not ascend"
            found[name] += told
    return found


LINE = re.compile(r'\w+\{((?:\w+="(?:[^"\\]|\\.)*",?)+)\} (\S+) (\d+\.\d{3})', re.DOTALL)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.DOTALL)
UNESCAPE = re.compile(r"\\(.)")


def plain(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


@pytest.fixture(scope="module")
def exported(run: Run) -> dict[str, list[Sample]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openmetrics, "PENDING", 500)  # so that samples wait in files
        path = run.path.parent / "run.om"
        assert main(["export", str(run.path), "--format", "openmetrics", "-o", str(path)]) == 0
    text = path.read_bytes().decode()
    assert path.stat().st_mode & 0o777 == 0o600
    return samples_of(text)


# ---- OpenMetrics


def test_names_and_labels_are_those_of_the_live_exposition(exported, run) -> None:
    known = {m.name: set(m.labels) for m in METRICS}
    for name, samples in exported.items():
        for labels, _, _ in samples:
            assert set(labels) == {*known[name], "job", "instance", "run"}, name
            assert (labels["job"], labels["instance"]) == ("replay:made", made_runs.NODE)
            assert labels["run"] == run_label(run.identity)
    (info,) = {tuple(x.items()) for x, _, _ in exported["ddpprobe_job_info"]}
    assert dict(info)["directory"] == str(run.path)
    absent = set(known) - set(exported)
    # There is nothing of which to tell: no step was lost, the run went to no object store, and no
    # rank stood still.
    uploads = {"ddpprobe_upload_lag_seconds", "ddpprobe_upload_failures_total"}
    lost = {"ddpprobe_records_dropped_total", "ddpprobe_unrecorded_steps"}
    # When a node pushed is nobody's record.
    nodes = {"ddpprobe_node_last_block_timestamp_seconds"}
    # No blocks, no experts, and no norms of gradients before the reduction.
    derived = {f"ddpprobe_{each.name}" for each in (*DERIVED, NOISE_SCALE)}
    # The made run has no rows of weights and no histograms.
    sites = {"ddpprobe_site_update_ratio", "ddpprobe_site_magnitude_bucket"}
    assert absent == {*lost, *uploads, *nodes, *derived, *sites, "ddpprobe_rank_stuck"}


def test_there_is_one_sample_a_sampled_step_at_its_own_time(exported, run) -> None:
    for rank in range(2):
        told = [s for s in exported["ddpprobe_loss"] if s[0]["rank"] == str(rank)]
        scalars = run.scalars("loss", rank)
        assert [t for _, _, t in told] == [START + step for step in scalars.steps]
        np.testing.assert_array_equal([v for _, v, _ in told], scalars.values[:, 0])


@pytest.mark.parametrize("stat", ["abs_max", "rms"])
def test_the_sites_say_what_the_series_say(exported, run, stat) -> None:
    series = run.series("*", stat)
    for column, site in enumerate(series.sites):
        if site.fqn == "pair":
            continue  # several leaves are one series
        key = (label_value(site.fqn or "(root)"), site.kind)
        told = {
            t - START: v
            for labels, v, t in exported[f"ddpprobe_site_{stat}"]
            if (labels["fqn"], labels["kind"]) == key
        }
        values = series.values[:, column]
        there = ~np.isnan(values)
        assert list(told) == series.steps[there].tolist(), site
        assert list(told.values()) == values[there].tolist(), site


def test_counters_begin_at_zero_and_end_with_the_whole(exported, run) -> None:
    bad = [s for s in exported["ddpprobe_nonfinite_elements_total"] if s[0]["rank"] == "1"]
    by_kind = {k: [v for labels, v, _ in bad if labels["kind"] == k] for k in ("output", "input")}
    assert by_kind["output"][0] == 0
    assert by_kind["output"][-1] == 64 * (STEPS - BAD)
    assert set(by_kind["input"]) == {0}
    steps = [v for labels, v, _ in exported["ddpprobe_steps_total"] if labels["rank"] == "0"]
    assert (steps[0], steps[-1]) == (0, STEPS)
    assert max(v for _, v, _ in exported["ddpprobe_skipped_steps_total"]) == 1
    pages = sum(a.level == "page" and a.detector == "nonfinite" for a in run.anomalies())
    found = exported["ddpprobe_anomalies_total"]
    mine = [v for x, v, _ in found if (x["detector"], x["level"]) == ("nonfinite", "page")]
    assert pages
    assert (mine[0], mine[-1]) == (0, pages)


def test_a_death_is_told_when_it_happened(exported) -> None:
    ((labels, value, when), *_) = exported["ddpprobe_first_failure_timestamp_seconds"]
    assert (labels["rank"], labels["signal"]) == ("1", "SIGKILL")
    assert value == when == START + STEPS - 0.5
    up = [(t, v) for x, v, t in exported["ddpprobe_rank_up"] if x["rank"] == "1"]
    assert {v for t, v in up if t < when} == {1}
    assert {v for t, v in up if t >= when} == {0}


def test_how_a_rank_ended_badly_is_told_from_then_on(exported) -> None:
    told = exported["ddpprobe_rank_end_info"]
    assert {(x["rank"], x["signal"], v) for x, v, _ in told} == {("1", "SIGKILL", 1)}
    assert min(when for _, _, when in told) == START + STEPS - 0.5


def test_an_order_counts_from_the_first_step_that_it_is_for(exported) -> None:
    told = exported["ddpprobe_orders_total"]
    counts = [(t, v) for x, v, t in told if x["action"] == "capture"]
    assert {v for t, v in counts if t < START + ORDERED} == {0}
    assert {v for t, v in counts if t >= START + ORDERED} == {1}
    assert {v for x, v, _ in told if x["action"] != "capture"} == {0}


@pytest.mark.parametrize("moved", [False, True])
def test_a_hang_is_told_when_it_was_noticed_and_who_was_waited_for(tmp_path, moved) -> None:
    made = made_runs.Made(tmp_path / "run")
    for step in range(3):
        made.write([record(rank, step) for rank in range(2)])
    noticed = (START + 20) * 10**9
    made.tell(framing.LIFE, {"event": "stalled", "time_ns": noticed})
    if moved:
        made.tell(framing.LIFE, {"event": "moving", "time_ns": noticed + 10**9})
    for rank, state in enumerate(("backward", "forward")):
        place = {"step": 3, "steps": 3, "micro": 0, "state": state}
        told = {"event": "exit", "rank": rank, "how": "SIGTERM", "order": 0, "witness": "daemon"}
        made.tell(framing.LIFE, {**told, **place, "time_ns": noticed + 10 * 10**9})
    directory = made.close(cleanly=False).path
    told = list(views(MergedReader(RunDir(directory)), Selection(), []))
    hung = [view for view in told if view.stuck]
    assert [(view.time_ns, view.state, view.stuck) for view in hung] == (
        [] if moved else [(noticed, "hung", {1: "forward"})]
    )
    assert [view.time_ns for view in told] == sorted(view.time_ns for view in told)
    assert told[-1].state == ("stopped" if moved else "hung")
    found = ddpprobe.open(directory).anomalies()
    last = list(views(MergedReader(RunDir(directory)), Selection(), found))[-1]
    # Its end is the first cause of a run that hung, and was seen when it was told.
    assert (last.first_cause is None) == moved
    assert last.first_cause is None or noticed < last.first_cause.time_ns <= last.time_ns
    assert not [
        v
        for v in views(MergedReader(RunDir(directory)), Selection(steps=slice(0, 2)), [])
        if v.stuck
    ]


def test_what_a_daemon_says_of_the_same_records_is_what_is_exported(tmp_path) -> None:
    made = made_runs.Made(tmp_path / "run")
    for step in range(BAD + 2):
        made.write([record(rank, step) for rank in range(2)])
    directory = made.close().path
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", directory, copy], check=True)
    attempt = Attempt(
        RunDir(copy), made_runs.NODE, 0, ProcessWatcher(), GatherQueue(tmp_path / "inbox"), None
    )
    while attempt.poll(1.0)[0]:
        pass
    attempt.close()
    live = view_of(
        attempt, Readings(), run_id="id", finished=True, dropped={}, restarts={}, components={}
    )
    run = ddpprobe.open(directory)
    told = list(views(MergedReader(RunDir(directory)), Selection(), run.anomalies()))
    last, end = told[-2], told[-1]
    for name in ("nonfinite", "loss", "grad_norm", "loss_scale", "sites_expected", "anomalies"):
        for mine, theirs in zip(last.ranks, live.ranks, strict=True):
            np.testing.assert_equal(getattr(mine, name), getattr(theirs, name), name)
    assert last.merged is not None
    assert live.merged is not None
    assert made_runs.key(last.merged) == made_runs.key(live.merged)
    assert end.anomalies == live.anomalies
    assert end.first_cause == live.first_cause is not None
    assert (end.run_id, end.world_size, end.is_head) == (live.run_id, live.world_size, live.is_head)
    assert end.finished
    under_way = list(
        views(MergedReader(RunDir(directory)), Selection(), run.anomalies(), live=True)
    )
    assert not under_way[-1].finished
    assert len(under_way) == len(told) - 1


def test_steps_and_a_rank_select(run, call, tmp_path) -> None:
    code, text, _ = call(run.path, "--format", "openmetrics", "--steps", "10:20", "--rank", 1)
    assert code == 0
    found = samples_of(text)
    assert [t - START for _, _, t in found["ddpprobe_loss"]] == list(range(10, 20))
    assert {x["rank"] for x, _, _ in found["ddpprobe_loss"]} == {"1"}
    assert "ddpprobe_first_failure_timestamp_seconds" not in found
    assert len({t for _, _, t in found["ddpprobe_site_rms"]}) == 10


def test_a_rank_that_an_attempt_has_not_is_refused_by_name(tmp_path, call) -> None:
    made_runs.Made(tmp_path / "run", ranks=1).whole(3).close()
    made_runs.Made(tmp_path / "run", ranks=2, attempt=1).whole(3).close()
    wanted = (tmp_path / "run", "--format", "csv", "--rank", 1)
    code, _, err = call(*wanted, "--attempt", 0)
    assert (code, "no rank 1 in attempt 0; it has 0" in err) == (2, True)
    assert call(*wanted, "--attempt", 1)[0] == 0


def test_what_was_found_in_an_attempt_still_counts_in_the_next_one(tmp_path, call) -> None:
    for attempt in range(2):
        made = made_runs.Made(tmp_path / "run", attempt=attempt)
        for step in range(BAD + 2):
            now = (START + 100 * attempt + step) * 10**9
            parts = [record(rank, step) for rank in range(2)]
            made.write([replace(x, attempt=attempt, wall_time_ns=now) for x in parts])
        made.close()
    code, text, _ = call(tmp_path / "run", "--format", "openmetrics")
    assert code == 0
    pages = ddpprobe.open(tmp_path / "run").anomalies()
    assert {a.attempt for a in pages} == {0, 1}
    for name, labels, last in (
        ("anomalies_total", {"detector": "nonfinite", "level": "page"}, 2),
        ("rank_anomalies_total", {"rank": "1", "level": "page"}, 2),
        ("nonfinite_elements_total", {"rank": "1", "kind": "output"}, 2 * 64 * 2),
    ):
        found = samples_of(text)[f"ddpprobe_{name}"]
        values = [v for x, v, _ in found if labels.items() <= x.items()]
        assert values == sorted(values)
        assert (values[0], values[-1]) == (0, last)
    steps = [v for x, v, _ in samples_of(text)["ddpprobe_steps_total"] if x["rank"] == "0"]
    assert steps.count(0) == 2  # a rank's own: they begin anew with its process


def test_a_restarted_run_goes_on_in_the_same_series(tmp_path, call) -> None:
    for attempt in range(2):
        made = made_runs.Made(tmp_path / "run", attempt=attempt)
        made.whole(4, told=False).close()
    path = tmp_path / "run"
    code, text, said = call(path, "--format", "openmetrics", "-o", "-")
    found = samples_of(text)["ddpprobe_loss"]
    assert code == 0
    assert list(text_string_to_metric_families(text))
    assert len([x for x, _, _ in found if x["rank"] == "0"]) == 8
    # The helper's records are a nanosecond apart, and Prometheus counts in milliseconds.
    assert "moments were not later than the one before" in said
    times = [t for x, _, t in found if x["rank"] == "0"]
    assert times == sorted(set(times))
    restarts = samples_of(text)["ddpprobe_restarts_total"]
    assert {x["state"] for x, v, _ in restarts if v} == {"ended"}
    assert [v for x, v, _ in restarts if x["state"] == "ended"][-1] == 1.0
    assert {v for x, v, _ in restarts if x["state"] == "crashed"} == {0.0}
    _, one, _ = call(path, "--format", "openmetrics", "--attempt", 1)
    assert len([x for x, _, _ in samples_of(one)["ddpprobe_loss"] if x["rank"] == "0"]) == 4


def test_each_node_is_an_instance_and_the_head_has_the_sites(tmp_path, call) -> None:
    made = made_runs.Made(tmp_path / "run")
    made.writer(0)
    made.node = "node_0001"
    made.writer(1)
    made.node = made_runs.NODE
    for step in range(3):
        made.write([replace(record(rank, step), wall_time_ns=10**18 + step * 10**9)
                    for rank in range(2)])  # fmt: skip
    made.close()
    code, text, _ = call(tmp_path / "run", "--format", "openmetrics")
    both = samples_of(text)
    assert code == 0
    where = {(x["rank"], x["instance"]) for x, _, _ in both["ddpprobe_loss"]}
    assert where == {("0", "node_0000"), ("1", "node_0001")}
    assert {x["instance"] for x, _, _ in both["ddpprobe_site_rms"]} == {"node_0000"}
    assert {x["instance"] for x, _, _ in both["ddpprobe_anomalies_total"]} == {"node_0000"}
    one = samples_of(call(tmp_path / "run", "--format", "openmetrics", "--rank", 1)[1])
    assert {x["rank"] for x, _, _ in one["ddpprobe_loss"]} == {"1"}
    assert one["ddpprobe_site_rms"] == both["ddpprobe_site_rms"]
    ended = one["ddpprobe_job_finished"]
    assert [v for x, v, _ in ended if x["instance"] == "node_0000"][-1] == 1


def test_the_cap_on_series_holds_and_is_said(tmp_path, call) -> None:
    sites = tuple(Site(f"m{i}", "output") for i in range(SERIES_LIMIT))
    counts = np.ones((len(sites), len(COUNTS)), np.int64)
    counts[:, 1:4] = 0
    made = made_runs.Made(tmp_path / "run", ranks=1)
    values = np.ones((len(sites), 4))
    made.write([made_runs.record(0, 0, 1, sites=sites, counts=counts, values=values)])
    made.close()
    out = tmp_path / "x.om"
    code, said, notes = call(tmp_path / "run", "--format", "openmetrics", "-o", out, "--json")
    facts = json.loads(said)
    assert code == 0
    samples = [t for t in out.read_text().splitlines() if not t.startswith("#")]
    # As in a scrape, the cap is on what there is at a time: each state of the job is a series.
    assert max(Counter(t.split()[-1] for t in samples).values()) <= SERIES_LIMIT
    states = {t.split()[0] for t in samples if t.startswith("ddpprobe_job_state{")}
    assert facts["series"] <= SERIES_LIMIT + len(states) - 1
    at_the_step = [t for t in samples if t.endswith(" 1000000000.000")]
    assert len(at_the_step) + facts["dropped"] > 2 * SERIES_LIMIT
    assert f"{facts['dropped']} samples of series beyond the {SERIES_LIMIT}" in notes


# ---- the long table


def rows_of_csv(path: Path) -> list[dict[str, Any]]:
    """Read a table back: absent is None, names are unescaped."""
    turn = {"int": int, "float": float, "text": unescape, "time": np.datetime64}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {
                name: None if text == "" and table.TYPES[name] != "text" else
                turn[table.TYPES[name]](text.removesuffix("Z") if name == "wall_time" else text)
                for name, text in row.items()
            }
            for row in csv.DictReader(file)
        ]  # fmt: skip


def rows_of_parquet(path: Path) -> list[dict[str, Any]]:
    found = pq.read_table(path)
    assert found.schema.field("numel").type == "int64"
    assert found.schema.field("rms").type == "double"
    assert str(found.schema.field("wall_time").type) == "timestamp[ns, tz=UTC]"
    texts = table.TEXTS
    times = found["wall_time"].to_numpy()
    rows = found.drop_columns("wall_time").to_pylist()
    return [
        {**row, **{name: unescape(row[name]) for name in texts}, "wall_time": when}
        for row, when in zip(rows, times, strict=True)
    ]


@pytest.mark.parametrize(("format_", "read"), [("csv", rows_of_csv), ("parquet", rows_of_parquet)])
def test_the_table_reads_back_as_what_the_run_says(
    run, call, tmp_path, monkeypatch, format_, read
) -> None:
    monkeypatch.setattr(table, "GROUP_ROWS", 100)  # many row groups
    out = tmp_path / "table"
    for rank in (None, 1):
        which = [] if rank is None else ["--rank", rank]
        code, said, _ = call(run.path, "--format", format_, "-o", out, *which)
        assert code == 0
        assert "rows of 29 columns" in said
        rows = read(out)
        assert_sites_equal(run, rows, rank)
        assert_scalars_equal(run, rows, rank)
    if format_ == "parquet":
        assert pq.ParquetFile(out).metadata.num_row_groups > 5


def assert_sites_equal(run: Run, rows: list[dict[str, Any]], rank: int | None) -> None:
    mine = [row for row in rows if row["kind"] != table.SCALAR]
    assert {row["rank"] for row in mine} == {rank}
    cells = {(r["step"], r["fqn"], r["kind"], r["leaf"]): r for r in mine}
    assert len(cells) == len(mine) == STEPS * len(SITES)
    for stat in STATS:
        series = run.series("*", stat, rank)
        for step, values in zip(series.steps, series.values, strict=True):
            for site, value in zip(series.sites, values, strict=True):
                row = cells[int(step), *(site.fqn, site.kind, site.leaf)]
                told = math.nan if row[stat] is None else row[stat]
                assert told == value or (math.isnan(told) and math.isnan(value)), (stat, site)
                assert (row["placement"], row["dtype"]) == (site.placement, site.dtype)
    one = cells[UNOBSERVED, "blocks.0.mlp", "output", ""]
    assert (one["rms"], one["numel"], one["observed"]) == (None, None, (rank is None and 0) or 0)
    assert cells[BAD, "blocks.1.mlp", "grad_output", ""]["norm"] == math.inf
    assert one["wall_time"] == np.datetime64((START + UNOBSERVED) * 10**9 + 1, "ns")


def assert_scalars_equal(run: Run, rows: list[dict[str, Any]], rank: int | None) -> None:
    mine = [row for row in rows if row["kind"] == table.SCALAR]
    assert {row["rank"] for row in mine} == ({0, 1} if rank is None else {rank})
    assert all(row["rms"] is None and row["leaf"] == "" for row in mine)
    for name in ("loss", "lr\n"):
        scalars = run.scalars(name, rank)
        told = {(r["step"], r["rank"]): r["value"] for r in mine if r["fqn"] == name}
        for step, values in zip(scalars.steps, scalars.values, strict=True):
            for whose, value in zip(scalars.ranks, values, strict=True):
                np.testing.assert_equal(told[int(step), whose], value)


def test_each_rank_s_own_rows_follow_one_another(run, call, tmp_path) -> None:
    out = tmp_path / "all.csv"
    assert call(run.path, "--format", "csv", "--rank", "all", "-o", out)[0] == 0
    ranks = [row["rank"] for row in rows_of_csv(out)]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1}


def test_csv_holds_no_formula_and_one_row_a_line(run, call) -> None:
    code, text, _ = call(run.path, "--format", "csv", "--steps", "3")
    assert code == 0
    lines = text.split("\n")
    assert all(len(next(csv.reader([line]))) == len(table.TYPES) for line in lines[:-1])
    cells = [cell for row in csv.reader(lines) for cell in row]
    assert [c for c in cells if c[:1] in ("=", "+", "@")] == []
    assert "\\u003d1+1" in cells


def test_no_more_than_a_row_group_is_held(run) -> None:
    seen = 0
    for block in table.blocks(MergedReader(RunDir(run.path)), Selection(EVERY_RANK)):
        rows = {len(cells.data) for cells in block.values()}
        assert len(rows) == 1
        assert max(rows) < table.GROUP_ROWS + len(SITES) + 20
        seen += max(rows)
    assert seen > 2 * STEPS * len(SITES)


# ---- a real Prometheus


@pytest.fixture(scope="module")
def served(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The run served by `export --serve`, which is then interrupted."""
    home = tmp_path_factory.mktemp("served")
    with (home / "out").open("w+") as out, (home / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-c",
             "import sys; from ddpprobe.cli.main import main; sys.exit(main())",
             "export", str(run.path), "--serve", "--json",
             "--listen", "127.0.0.1:0", "-o", str(home / "blocks")],
            stdout=out, stderr=err, env={**os.environ, "TMPDIR": str(home)},
        )  # fmt: skip
        try:
            assert prometheus_harness.until(
                lambda: (home / "out").read_text().endswith("}\n") or process.poll() is not None, 60
            )
            assert process.poll() is None, (home / "err").read_text()
            facts = json.loads((home / "out").read_text())
            yield {**facts, "home": home, "process": process}
        finally:
            process.terminate()  # it takes its Prometheus along
            process.wait(60)


@pytest.fixture
def prometheus(served, monkeypatch: pytest.MonkeyPatch) -> prometheus_harness.Prometheus:
    monkeypatch.setattr(prometheus_harness, "JOB", served["job"])
    there = object.__new__(prometheus_harness.Prometheus)
    there.url = served["url"]
    return there


def test_every_panel_of_the_dashboards_shows_the_past_run(served, prometheus, run) -> None:
    start, end = served["from"], math.ceil(served["to"])  # as its link says
    chosen = {"run": run_label(run.identity)}
    for board, panel in prometheus_harness.PANELS:
        found = []
        for target in panel.get("targets", []):
            result = prometheus.panel(target, start, end, **chosen)
            if any(name in target["expr"] for name in (*OWN_OF_PROMETHEUS, "ddpprobe_upload")):
                assert not result, panel["title"]  # only a scrape makes these, or a run with a URL
            for label in prometheus_harness.labels_of(target):
                assert all(label in row["metric"] for row in result), (panel["title"], label)
            found += result
        there = bool(found) or panel["type"] == "text" or "Empty" in panel["description"]
        assert there, (board, panel["title"])
    for annotation in prometheus_harness.ANNOTATIONS:
        found = prometheus.panel(annotation, start, end, **chosen)
        assert found or annotation["name"] == "Restarts", annotation["expr"]
    for _, variable in prometheus_harness.VARIABLES:
        assert prometheus.variable(variable, start, end, **chosen), variable["definition"]


def test_prometheus_holds_what_the_run_says(served, prometheus, run) -> None:
    span = f"[{math.ceil(served['to'] - served['from']) + 1}s]"
    query = f'ddpprobe_grad_norm{{rank="1"}}{span}'
    ((found,),) = [prometheus.get("query", query=query, time=str(served["to"]))["result"]]
    scalars = run.scalars("grad_norm_local", 1)
    told = [(float(t) - START, float(v)) for t, v in found["values"]]
    assert told == list(zip(scalars.steps, scalars.values[:, 0], strict=True))
    names = prometheus.get("label/fqn/values")
    assert {label_value(name) for name in EVIL if name} <= set(names)


def test_a_long_run_is_cut_in_time_and_nothing_is_lost_or_doubled(
    run, call, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(job, "BLOCK_SAMPLES", 1000)
    monkeypatch.setattr(openmetrics, "PENDING", 400)
    blocks, whole = tmp_path / "blocks", tmp_path / "whole.om"
    code, said, _ = call(run.path, "--format", "blocks", "-o", blocks, "--json")
    facts = json.loads(said)
    assert code == 0
    assert facts["blocks"] > 3
    assert call(run.path, "--format", "openmetrics", "-o", whole)[0] == 0
    told = [
        time for samples in samples_of(whole.read_bytes().decode()).values() for *_, time in samples
    ]
    metas = [json.loads(path.read_text()) for path in blocks.glob("*/meta.json")]
    assert sum(meta["stats"]["numSamples"] for meta in metas) == facts["samples"] == len(told)
    spans = sorted((meta["minTime"], meta["maxTime"]) for meta in metas)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blocks", "whole.om"]


def test_ctrl_c_ends_it_and_leaves_the_blocks_only(served) -> None:
    process, home = served["process"], served["home"]
    process.send_signal(signal.SIGINT)
    assert process.wait(30 * PATIENCE) == 0
    assert not prometheus_harness.Prometheus.ready(
        type("Gone", (), {"url": served["url"]})  # type: ignore[arg-type]
    )
    assert sorted(p.name for p in home.iterdir()) == ["blocks", "err", "out"]
    assert len(list((home / "blocks").iterdir())) == served["blocks"] == 1
    assert (home / "err").read_text() == ""


# ---- wrong use, missing tools, damage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [],
            (
                "say what to write with --format (openmetrics, blocks, csv, parquet, overview), "
                "or --serve"
            ),
        ),
        (["--format", "csv", "--serve"], "leave --format out"),
        (["--format", "csv", "--listen", "x"], "give both"),
        (["--format", "parquet", "-o", "-"], "give -o PATH"),
        (["--format", "csv", "--json"], "give -o PATH"),
        (["--format", "openmetrics", "--rank", "all"], "of all ranks anyway"),
        (["--format", "csv", "--rank", "7"], "no rank 7 in this run; it has 0, 1"),
        (["--format", "csv", "--rank", "x"], "expected a rank (0, 1, ...) or all"),
        (["--format", "csv", "--attempt", "3"], "no attempt 3 in this run; it has 0"),
        (["--format", "csv", "--steps", "900:"], "no recorded step in --steps"),
        (["--format", "openmetrics", "--steps", "900:"], "no recorded step in --steps"),
        (["--serve", "--listen", "nowhere"], "write HOST:PORT"),
    ],
)
def test_wrong_use_is_said_in_one_line(run, call, words, says) -> None:
    code, _, err = call(run.path, *words)
    assert code == 2
    assert says in err.splitlines()[-1]


@pytest.mark.parametrize("words", [["--steps", "900:"], ["--steps", "900:", "--rank", "all"]])
def test_without_a_row_not_even_the_header_is_written(run, call, words) -> None:
    assert call(run.path, "--format", "csv", *words)[1] == ""


@pytest.mark.parametrize("format_", ["csv", "openmetrics", "parquet", "overview"])
def test_a_directory_in_the_place_of_a_file_is_said_with_what_to_give(
    run, call, tmp_path, format_
) -> None:
    code, _, err = call(run.path, "--format", format_, "-o", tmp_path)
    assert code == 2
    name = f"{run.path.name}{SUFFIXES[format_]}"
    says = f"{tmp_path}: a directory; give the file to write: -o {tmp_path / name}"
    assert err == f"ddpprobe: {says}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format_", ["csv", "parquet", "blocks"])
def test_where_no_file_can_be_written_it_says_so_before_it_reads(
    run, call, tmp_path, monkeypatch, format_
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    given = ["-o", "x.csv"] if format_ == "csv" else []
    code, out, err = call(run.path, "--format", format_, *given)
    assert (code, out) == (2, "")
    name = "x.csv" if given else f"{run.path.name}{SUFFIXES[format_]}"
    says = f"{name}: no file can be written in {tmp_path}; give -o PATH in another one"
    assert err == f"ddpprobe: {says}\n"
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--format", "blocks"], ["--serve"]])
def test_blocks_below_a_directory_that_is_not_there_are_refused(run, call, tmp_path, words) -> None:
    above = tmp_path / "none"
    code, _, err = call(run.path, *words, "-o", above / "out")
    assert code == 2
    assert err.endswith(f"there is no directory {above}; make it first: mkdir -p {above}\n")


def test_a_missing_tool_is_named_with_what_to_install(run, call, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        "promtool, which is not on the PATH" in call(run.path, "--format", "blocks", "-o", out)[2]
    )
    assert "Prometheus is not on the PATH" in call(run.path, "--serve")[2]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = call(run.path, "--format", "parquet", "-o", out)
    assert code == 2
    assert "pip install 'ddpprobe[parquet]'" in err
    assert list(tmp_path.iterdir()) == []


def test_what_promtool_refuses_is_said(run, call, tmp_path, monkeypatch) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "promtool"
    tool.write_text("#!/bin/sh\necho first; echo 'out of bounds' >&2; exit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    code, _, err = call(run.path, "--format", "blocks", "-o", tmp_path / "out")
    assert (code, "promtool ended with 3: out of bounds" in err) == (2, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    code, _, err = call(run.path, "--format", "blocks", "-o", tmp_path / "full")
    assert (code, "new or empty directory" in err) == (2, True)


def test_an_older_file_stays_until_the_new_one_is_whole(run, call, tmp_path, monkeypatch) -> None:
    out = tmp_path / "old.csv"
    out.write_text("old")
    call(run.path, "--format", "csv", "-o", out, "--steps", "900:")
    assert [p.name for p in tmp_path.iterdir()] == ["old.csv"]
    assert out.read_text() == "old"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as cat:
        assert call(run.path, "--format", "csv", "-o", pipe, "--steps", "3")[0] == 0
        assert cat.communicate()[0].startswith(b"attempt,step,wall_time,rank,fqn,kind")
    assert pipe.is_fifo()


def test_a_damaged_store_is_exported_as_far_as_it_goes(tmp_path, call) -> None:
    path = make(tmp_path / "run", steps=20)
    victim = path / "run.zarr/attempt_000/rank_00001/counts/c/0/0/0"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, _, err = call(path, "--format", "openmetrics", "-o", tmp_path / "x.om")
    assert code == 3
    assert "lost:" in err
    assert samples_of((tmp_path / "x.om").read_bytes().decode())["ddpprobe_loss"]


def test_a_taken_port_is_said(run, call) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = call(run.path, "--serve", "--listen", listen)
        assert code == 2
        assert f"something listens at {listen} already" in err
        assert local_server.free_address(listen, 100) != listen
