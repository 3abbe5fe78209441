"""The whole flow on four real ranks under a real Prometheus, while they run and after they ended.

One run serves most tests here: `launch/train_gpt.py` under DDP, a NaN planted into one rank's
activation, scraped every second. The fixture gathers what must be seen while it lives; its ranks
wait for that shortly before the fault and shortly after it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import xarray
import zarr
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import ddpprobe
from ddpprobe.detectors.suite import default_suite, order_of_cause
from ddpprobe.records.step import Anomaly, StepRecord, derive
from ddpprobe.rundir.orders import Order, OrderReader
from ddpprobe.rundir.paths import RunDir

from .. import conftest, prometheus_harness
from ..launcher import Launcher
from ..waiting import deadline, is_gone
from . import real_job

HELD_GPT = Path(__file__).with_name("held_gpt.py")
STEPS, FAULT_STEP, FAULT_RANK, EVERY = 240, 80, 2, 2
HELD = (FAULT_STEP - 2, FAULT_STEP + 4)
MODULE = "blocks.1.mlp"
VERDICT = {
    "detector": "nonfinite", "level": "page", "step": FAULT_STEP, "micro": 0, "rank": FAULT_RANK,
    "module": MODULE, "kind": "output", "phase": "forward", "first_cause": True, "sampled": True,
}  # fmt: skip
# Longer than the 15 s that DdpprobeRankDead waits: it must stay silent all the way.
LINGER = 26.0
# Nothing of a run without a death.
NOT_IN_THIS_RUN = {"First failure", "Restarts", "Loss scale"}  # nobody dies, no GradScaler
UPLOADS = "ddpprobe_upload"  # nor has it a URL
MEMORY_BYTES = 128 << 20
THREADS = 12


until = prometheus_harness.until
start, said, scrape = real_job.start, real_job.said, real_job.scrape


@dataclass
class Live:
    """One run, and what was seen of it while it lived."""

    run: Path
    prometheus: Any
    daemon: psutil.Process
    exit_code: int = -1
    # Unix time: the first scrape, the end of training, when it was heard of, the end of the daemon
    first: float = 0.0
    trained: float = 0.0
    heard: float = 0.0
    over: float = 0.0
    pages: list[tuple[dict[str, str], float]] = field(default_factory=list)
    exemplars: list[dict[str, str]] = field(default_factory=list)
    verdict: tuple[int, str] = (-1, "")
    verdict_was_live: bool = False
    anomalies: list[Anomaly] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    metrics: str = ""
    maps: str = ""
    threads: int = 0
    memory: int = 0


def watch(live: Live, training: Launcher) -> None:
    """Ask everything that is to be known while the ranks run."""
    prometheus = live.prometheus
    page = 'ddpprobe_anomalies_total{detector="nonfinite",level="page"}'

    def paged() -> bool:
        live.pages = prometheus.now(page)
        return any(value == 1 for _, value in live.pages) or training.poll() is not None

    assert until(prometheus.ready)
    seen = "min(timestamp(ddpprobe_site_rms))"
    assert until(lambda: bool(prometheus.now(seen)))
    # A range from here on holds values from before the fault, after which some have none any more:
    # a second scrape of them too, as a range is rounded to seconds and leaves out its first moment.
    live.first = prometheus.now(seen)[0][1]
    assert until(lambda: prometheus.now(seen)[0][1] >= live.first + 1)
    let_go(live.run, HELD[0])
    assert until(paged, 60)
    assert until(lambda: bool(orders(live.run)))
    live.exemplars = prometheus.exemplars(page, live.first, time.time() + 5)
    live.verdict = real_job.ddpprobe_says("anomalies", live.run, "--json")
    run = ddpprobe.open(live.run)
    live.anomalies = run.anomalies()
    live.records = list(run.records())
    live.metrics = scrape(said(live.run)["listen"])
    live.verdict_was_live = training.poll() is None
    let_go(live.run, HELD[1])
    live.exit_code = training.wait(60)
    live.trained = time.time()
    # A point a second after what Prometheus was told of the end.
    finished = "ddpprobe_job_finished offset 2s"
    assert until(lambda: any(v == 1 for _, v in prometheus.now(finished)))
    live.heard = time.time()
    live.maps = Path(f"/proc/{live.daemon.pid}/maps").read_text()
    live.threads = live.daemon.num_threads()


def let_go(run: Path, step: int) -> None:
    """Let the ranks begin a step before which they wait (`held_gpt`)."""
    (run.parent / f"go.{step}").touch()


def orders(run: Path) -> list[Order]:
    """Return what was ordered of the ranks so far."""
    with contextlib.closing(OrderReader(RunDir(run).orders(0, "node_0000"))) as board:
        return list(iter(board.look, None))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The run, from its start to the end of its ranks; its daemon lingers."""
    folder = tmp_path_factory.mktemp("live")
    run = folder / "run"
    script = [
        HELD_GPT, folder, ",".join(map(str, HELD)), "--wrap=ddp", "--layers=2", "--dim=32",
        "--length=32", "--batch=2", f"--steps={STEPS}", "--eval-every=80", f"--every={EVERY}",
        f"--run-dir={run}", f"--inject=nan:step={FAULT_STEP},rank={FAULT_RANK},module={MODULE}",
    ]  # fmt: skip
    # Prometheus takes some seconds until it knows a target: it starts first.
    listen = f"127.0.0.1:{real_job.free_port()}"
    env = {"DDPPROBE_LINGER": str(LINGER), "DDPPROBE_LISTEN": listen}
    prometheus = prometheus_harness.Prometheus(folder, ddpprobe=listen)
    # What the daemon takes of the machine is asked: it is an interpreter of its own.
    training = start(script, folder, 4, env, fresh=False, forks_daemons=False)
    try:
        assert until(lambda: bool(said(run))), (folder / "torchrun.out").read_text()
        assert said(run)["listen"] == listen
        seen = Live(run, prometheus, psutil.Process(said(run)["pid"]))
        watch(seen, training)
        yield seen
    finally:
        conftest.end_tree(training)
        conftest.end_daemons(folder)
        prometheus.close()


@pytest.fixture(scope="module")
def ended(live: Live) -> None:
    """Wait for the exit of the daemon; what needs not wait is asked before."""
    late = deadline(LINGER + 20)
    while not is_gone(live.daemon) and time.monotonic() < late:
        with contextlib.suppress(psutil.NoSuchProcess):
            live.memory = max(live.memory, live.daemon.memory_info().rss)
        time.sleep(0.2)
    live.over = time.time()


behind_its_end = pytest.mark.usefixtures("ended")


def test_training_ends_as_without_the_probe(live: Live) -> None:
    output = (live.run.parent / "torchrun.out").read_text()
    assert live.exit_code == 0, output
    assert "ddpprobe:" not in output  # nothing to complain of


def test_prometheus_counts_the_page_and_its_exemplar_names_the_tensor(live: Live) -> None:
    assert [value for _, value in live.pages] == [1.0]
    want = {"step": str(FAULT_STEP), "fqn": MODULE, "kind": "output", "rank": str(FAULT_RANK)}
    assert want in live.exemplars


def test_the_command_line_gives_the_verdict_of_the_live_run_exactly(live: Live) -> None:
    code, text = live.verdict
    assert live.verdict_was_live
    assert code == 1
    found = json.loads(text)["anomalies"]
    assert {key: found[0][key] for key in VERDICT} == VERDICT
    assert [a for a in found[1:] if a["level"] == "page"] == []


def test_steps_rise_on_every_rank(live: Live) -> None:
    series = live.prometheus.between("ddpprobe_steps_total", live.first, live.trained)
    counts = {s["metric"]["rank"]: [float(v) for _, v in s["values"]] for s in series}
    assert sorted(counts) == ["0", "1", "2", "3"]
    for values in counts.values():
        assert values == sorted(values)
        assert values[0] < FAULT_STEP < values[-1] <= STEPS


def test_metrics_are_those_of_the_run(live: Live) -> None:
    families = text_string_to_metric_families(live.metrics)
    samples = [sample for family in families for sample in family.samples]

    def of(name: str, **labels: str) -> list[float]:
        name = f"ddpprobe_{name}"
        return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]

    [page] = [s for s in samples if s.exemplar and s.labels["detector"] == "nonfinite"]
    assert page.exemplar.labels["fqn"] == MODULE
    assert of("nonfinite_elements_total", rank=str(FAULT_RANK), kind="output")[0] > 0
    assert of("rank_anomalies_total", rank=str(FAULT_RANK), level="page") == [1]
    assert of("rank_up") == [1] * 4
    assert set(of("component_up")) == {1}
    assert of("records_dropped_total") == []
    assert of("unrecorded_steps") == [0] * 4
    # `position` is never called, only its weight is used: expected, and said to be silent.
    assert [observed + 1 for observed in of("sites_observed")] == of("sites_expected")
    assert min(of("sites_expected")) > 50


@pytest.mark.parametrize(("board", "panel"), prometheus_harness.PANELS)
def test_every_panel_of_the_dashboards_shows_the_run(
    live: Live, board: str, panel: dict[str, Any]
) -> None:
    found = []
    for target in panel.get("targets", []):
        result = live.prometheus.panel(target, live.first, live.trained)
        assert not result or UPLOADS not in target["expr"], panel["title"]
        for label in prometheus_harness.labels_of(target):
            assert all(label in row["metric"] for row in result), (panel["title"], label)
        found += result
    absent = panel["title"] in NOT_IN_THIS_RUN
    empty = absent or panel["type"] == "text" or "Empty" in panel["description"]
    assert found or empty, (board, panel["title"])
    assert not (found and absent), (board, panel["title"])


def test_annotations_and_variables_find_the_run(live: Live) -> None:
    for annotation in prometheus_harness.ANNOTATIONS:
        found = live.prometheus.panel(annotation, live.first, live.heard)
        assert bool(found) == (annotation["name"] not in NOT_IN_THIS_RUN), annotation["name"]
    values = {
        v["name"]: live.prometheus.variable(v, live.first, live.trained)
        for _, v in prometheus_harness.VARIABLES
    }
    assert values["job"] == ["ddpprobe"]
    assert values["rank"] == ["0", "1", "2", "3"]


@behind_its_end
def test_the_alerts_name_the_nan_and_no_death(live: Live) -> None:
    series = live.prometheus.between('ALERTS{alertstate="firing"}', live.first, live.over)
    firing = {(s["metric"]["alertname"], s["metric"].get("rank")) for s in series}
    assert firing == {("DdpprobeFirstCause", str(FAULT_RANK))}
    # Prometheus still looked when the rule would have had its 15 s.
    finished = live.prometheus.between("ddpprobe_job_finished == 1", live.first, live.over)
    assert len(finished[0]["values"]) > 15


@behind_its_end
def test_the_daemon_seals_lingers_and_leaves_nothing(live: Live) -> None:
    assert live.over - live.trained > LINGER - 8  # it ended by itself, and not before
    assert is_gone(live.daemon)
    assert said(live.run) == {}
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert [c for c in commands if str(live.run) in c] == []
    events = [json.loads(e)["event"] for e in _store(live, "node_0000")["event_json"][:]]
    assert {"finished", "sealed", "closed"} <= set(events)
    assert list((live.run / "journal").rglob("rank_*/*.wal")) == []
    assert "ERROR" not in (live.run / "daemon/node_0000.log").read_text()


@behind_its_end
def test_the_daemon_is_small_and_knows_no_torch(live: Live) -> None:
    assert "libtorch" not in live.maps
    assert live.threads <= THREADS
    assert live.memory < MEMORY_BYTES, f"{live.memory / 2**20:.0f} MiB"


def _store(live: Live, group: str) -> zarr.Group:
    found = zarr.open_group(live.run / "run.zarr", mode="r")[f"attempt_000/{group}"]
    assert isinstance(found, zarr.Group)
    return found


def sampled_steps(live: Live) -> list[int]:
    """Return the steps of the interval, and those that the black box captured at the page."""
    (order,) = orders(live.run)
    assert FAULT_STEP < order.start < STEPS
    return sorted({*range(0, STEPS, EVERY), *range(order.start, order.stop)})


@behind_its_end
@pytest.mark.parametrize("rank", [None, FAULT_RANK])
def test_plain_xarray_reads_the_statistics_that_the_records_hold(
    live: Live, rank: int | None
) -> None:
    group = "merged" if rank is None else f"rank_{rank:05d}"
    records = list(ddpprobe.open(live.run).records(rank))
    with xarray.open_zarr(live.run / "run.zarr", group=f"attempt_000/{group}") as dataset:
        assert dataset["step"].values.tolist() == [r.step for r in records]
        assert [r.step for r in records if r.sampled] == sampled_steps(live)
        place = {
            (fqn, kind, leaf): i
            for i, (fqn, kind, leaf) in enumerate(
                zip(*(dataset[n].values.tolist() for n in ("fqn", "kind", "leaf")), strict=True)
            )
        }
        counts, values = dataset["counts"].values, dataset["values"].values
    for row, record in enumerate(records):
        at = [place[site.key] for site in record.sites]
        np.testing.assert_array_equal(counts[row, at], record.counts)
        np.testing.assert_array_equal(values[row, at], record.values)


@behind_its_end
def test_the_store_keeps_what_the_live_run_said(live: Live) -> None:
    after = {r.step: r for r in ddpprobe.open(live.run).records()}
    assert len(live.records) > FAULT_STEP // EVERY
    for then in live.records:
        now = after[then.step]
        assert (then.sites, then.first_bad) == (now.sites, now.first_bad)
        np.testing.assert_equal(dict(then.scalars), dict(now.scalars))
        np.testing.assert_array_equal(then.counts, now.counts)
        np.testing.assert_array_equal(then.values, now.values)


@behind_its_end
def test_the_merged_row_is_the_sum_of_the_ranks_rows(live: Live) -> None:
    run = ddpprobe.open(live.run)
    nan = [run.series(MODULE, "nan", rank).values.sum(axis=1) for rank in (None, 0, 1, 2, 3)]
    np.testing.assert_array_equal(nan[0], sum(nan[1:]))
    assert nan[3][FAULT_STEP // EVERY] > 0


@behind_its_end
def test_anomalies_are_the_same_live_stored_and_replayed(live: Live) -> None:
    run = ddpprobe.open(live.run)
    stored = run.anomalies()
    assert stored == live.anomalies
    suite = default_suite()
    replayed = [a for record in run.records() for a in suite.update(record)] + suite.finish()
    assert order_of_cause(replayed) == stored
    group = _store(live, "anomalies")
    plain = {
        name: group[column][:].tolist()
        for name, column in {"step": "anomaly_step"}.items()
        | {(n, n) for n in VERDICT if n != "step"}
    }
    rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
    assert len(rows) == len(stored)
    assert [row for row in rows if row["level"] == "page"] == [VERDICT]


@behind_its_end
def test_the_verbs_read_the_ended_run(live: Live) -> None:
    code, text = real_job.ddpprobe_says("info", live.run, "--json")
    info = json.loads(text)
    assert (code, info["state"], info["world_size"], info["lost"]) == (0, "ended", 4, [])
    assert [r["status"] for r in info["attempts"][0]["ranks"]] == ["closed"] * 4
    assert [r["completeness"] for r in info["attempts"][0]["ranks"]] == [1.0] * 4
    assert info["attempts"][0]["sealed"]

    code, text = real_job.ddpprobe_says("verify", live.run, "--json")
    assert (code, json.loads(text)["ok"]) == (0, True)

    assert real_job.ddpprobe_says("anomalies", live.run)[0] == 1

    words = ("--site", "blocks.*mlp*", "--stat", "rms", "--json")
    code, text = real_job.ddpprobe_says("trace", live.run, *words)
    trace = json.loads(text)
    assert code == 0
    assert trace["steps"] == sampled_steps(live)
    assert f"{MODULE}:output" in {series["site"] for series in trace["series"]}
    shown = next(s for s in trace["series"] if s["site"] == f"{MODULE}:output")
    record = next(r for r in live.records if r.step == 0)
    row = next(i for i, s in enumerate(record.sites) if str(s) == f"{MODULE}:output")
    assert shown["values"][0] == derive("rms", record.counts[row], record.values[row])
    assert shown["nonfinite"][FAULT_STEP // EVERY] > 0
