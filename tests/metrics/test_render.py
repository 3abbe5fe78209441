"""What the exposition promises: valid in both formats, bounded, and silent on what is not known."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import parser as text_parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.samples import Sample

from ddpprobe.ends.anomalies import first_cause_of
from ddpprobe.metrics.labels import (
    EXEMPLAR_CHARACTERS,
    LABEL_BYTES,
    PATH_BYTES,
    label_value,
    ranks_label,
    run_label,
)
from ddpprobe.metrics.render import Exposition, exemplar_of, render
from ddpprobe.metrics.table import JOINED_ABOVE, LE, MAGNITUDES, METRICS, POSITIONS
from ddpprobe.records.histogram import EDGES
from ddpprobe.records.node_view import FirstFailure, NodeView, RankView
from ddpprobe.records.site_memory import Magnitudes, Outlier
from ddpprobe.records.step import (
    COUNTED_KINDS,
    COUNTS,
    LEVELS,
    STEP_PHASES,
    VALUE_IDENTITY,
    VALUES,
    Anomaly,
    Site,
    StepRecord,
    empty_rows,
)

SECOND = 10**9
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def a_rank(rank: int = 0, **changes: object) -> RankView:
    full = RankView(
        rank=rank,
        local_rank=rank,
        pid=100 + rank,
        device="cpu",
        up=True,
        last_heartbeat_ns=50 * SECOND,
        steps=7,
        skipped_steps=1,
        phase_seconds={"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 1.0},
        probe_seconds=0.4,
        overhead_ratio=0.05,
        sample_interval=20,
        unrecorded_steps=4,
        loss=2.5,
        grad_norm=0.75,
        loss_scale=1024.0,
        nonfinite={"output": 3},
        anomalies={"page": 1},
        sites_expected=10,
        sites_observed=9,
        resident_bytes=1000,
        cpu_seconds=5.0,
        components={"hooks": rank == 0, "journal": True},
    )
    return replace(full, **changes)  # type: ignore[arg-type]


def record(
    sites: list[Site],
    *,
    ranks: tuple[int, ...] = (0, 1),
    nan: dict[int, int] | None = None,
    unobserved: tuple[int, ...] = (),
    missing: tuple[int, ...] = (),
) -> StepRecord:
    """Row i holds 4 elements, its values in [-(i+1), i+1], sum of squares 4 * (i+1)^2."""
    n = len(sites)
    counts = np.zeros((n, len(COUNTS)), np.int64)
    counts[:, COUNTS.index("numel")] = 4
    counts[:, COUNTS.index("tapped")] = counts[:, COUNTS.index("observed")] = 1
    for row, count in (nan or {}).items():
        counts[row, COUNTS.index("nan")] = count
    for row in unobserved:
        counts[row] = 0
        counts[row, COUNTS.index("tapped")] = 1
    top = np.arange(1.0, n + 1)
    values = np.stack([-top, top, 0 * top, 4 * top**2], axis=1)
    values[list(unobserved)] = VALUE_IDENTITY
    return StepRecord(0, 3, ranks, 60 * SECOND, True, tuple(sites), counts, values, missing=missing)


def a_view(**changes: object) -> NodeView:
    full = NodeView(
        time_ns=61 * SECOND,
        run_id="r",
        directory="/runs/r",
        attempt=0,
        node="node_0000",
        world_size=2,
        torch="2.13.0",
        backend="gloo",
        is_head=True,
        detectors=("nonfinite", "rank_lost"),
        ranks=(a_rank(0), a_rank(1)),
        components={"gather": True},
        host={"cpu_ratio": 0.5, "memory_total_bytes": 8.0},
    )
    return replace(full, **changes)  # type: ignore[arg-type]


def an_anomaly(**changes: object) -> Anomaly:
    full = Anomaly(
        "nonfinite", "page", 412, 0, 5, "layers.17.attn.wo", "grad_output", "backward",
        True, "m", {"nan": 3.0}, True, 0, 55 * SECOND,
    )  # fmt: skip
    return replace(full, **changes)  # type: ignore[arg-type]


def samples(view: NodeView, *, openmetrics: bool = False) -> list[Sample]:
    text = render(view, openmetrics).decode("utf-8", "strict")
    parser = openmetrics_parser if openmetrics else text_parser
    return [s for f in parser.text_string_to_metric_families(text) for s in f.samples]


def series(view: NodeView) -> Series:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples(view)}


def value(view: NodeView, name: str, **labels: str) -> float | None:
    return series(view).get((f"ddpprobe_{name}", tuple(sorted(labels.items()))))


def rich_record() -> StepRecord:
    """A step of which all numbers of a whole step are known."""
    sites = [Site("w", "grad", placement="replicated"), Site("w", "grad_local")]
    for block in range(3):
        sites += [Site(f"blocks.{block}.fc", "output"), Site(f"blocks.{block}", "output")]
        sites += [Site(f"blocks.{block}", "grad_output")]
    sites += [Site(f"moe.experts.{expert}", "output") for expert in range(2)]
    norms = {"grad_norm_local": 2.0, "grad_norm": 2.0, "grad_norm_used": 1.0}
    made = replace(record(sites), scalars=dict.fromkeys(range(2), norms))
    made.counts[1, COUNTS.index("tapped")] = 2  # of both ranks
    made.values[:2, VALUES.index("sum")] = 2.0, 4.0  # a mean, and what both have
    return made


def rich_view() -> NodeView:
    return a_view(
        ranks=(a_rank(0), a_rank(1, end="SIGKILL")),
        outliers=(Outlier("blocks.0", "output", 3.5), Outlier("", "output", -1.0)),
        update_ratios={"w": 0.001},
        magnitudes={("blocks.0", "output"): np.arange(len(LE))},
        noise_scale=3.0,
        orders={"capture": 2},
        merged=rich_record(),
        first_failure=FirstFailure(1, "SIGKILL", 59 * SECOND),
        restarts={"crashed": 1},
        stuck={1: "forward"},
        first_cause=first_cause_of(an_anomaly()),
        nodes_expected=2,
        node_blocks={"node_0001": 60 * SECOND},
        anomalies={("nonfinite", "page"): 1},
        exemplars={("nonfinite", "page"): an_anomaly()},
        records_dropped={"disk_full": 2},
        upload_lag_seconds=2.5,
        upload_failures=3,
        host=dict.fromkeys(
            [
                "cpu_ratio",
                "load1",
                "memory_available_bytes",
                "memory_total_bytes",
                "disk_free_bytes",
            ],
            1.0,
        ),
    )


def test_both_formats_say_the_same_and_promtool_finds_no_fault() -> None:
    view = rich_view()
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=render(view, False),
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
    plain = [(s.name, s.labels, s.value) for s in samples(view)]
    assert plain == [(s.name, s.labels, s.value) for s in samples(view, openmetrics=True)]


def test_a_rich_view_has_every_metric_of_the_table() -> None:
    names = {s.name for s in samples(rich_view())}
    assert names == {m.name for m in METRICS}


def test_the_table_keeps_the_naming_rules() -> None:
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names)
    for m in METRICS:
        assert m.name.startswith("ddpprobe_")
        assert (m.kind == "counter") == m.name.endswith("_total"), m
        assert (m.kind == "histogram") == (m.labels[-1:] == ("le",)), m
        assert m.tier in "ABC", m
        assert len(m.help) > 20, m
        assert not {"job", "instance", "host", "cluster", "type"} & set(m.labels), m
        if m.unit in {"seconds", "bytes", "ratio"}:
            assert m.name.removesuffix("_total").endswith(f"_{m.unit}"), m


def test_labels_are_those_of_the_table() -> None:
    table = {m.name: set(m.labels) for m in METRICS}
    for s in samples(rich_view()):
        assert set(s.labels) == table[s.name], s


def test_values_of_a_rank() -> None:
    view = a_view()
    assert value(view, "rank_up", rank="0") == 1
    assert value(view, "rank_last_heartbeat_timestamp_seconds", rank="0") == 50
    assert value(view, "steps_total", rank="1") == 7
    assert value(view, "step_phase_seconds_total", rank="0", phase="backward") == 4
    assert value(view, "overhead_ratio", rank="0") == pytest.approx(0.05)
    assert value(view, "sample_interval_steps", rank="0") == 20
    assert value(view, "unrecorded_steps", rank="1") == 4
    assert value(view, "loss_scale", rank="1") == 1024
    assert value(view, "rank_anomalies_total", rank="1", level="page") == 1
    assert value(view, "last_collect_timestamp_seconds") == 61


def test_an_outlier_is_named_by_its_slot_and_a_weight_s_change_by_its_parameter() -> None:
    view = rich_view()
    assert value(view, "outlier_score", slot="0") == 3.5
    assert value(view, "outlier_info", slot="0", fqn="blocks.0", kind="output") == 1
    assert value(view, "outlier_info", slot="1", fqn="(root)", kind="output") == 1
    assert value(view, "site_update_ratio", fqn="w", kind="update") == 0.001


def test_orders_of_the_head_count_from_zero_by_action() -> None:
    counts = {each: value(rich_view(), "orders_total", action=each) for each in ("capture", "stop")}
    assert counts == {"capture": 2, "stop": 0}


def test_what_is_not_known_is_absent() -> None:
    unknown = RankView(rank=0, local_rank=0, pid=1, device="cpu")
    names = {s.name.removeprefix("ddpprobe_") for s in samples(a_view(ranks=(unknown,), host={}))}
    absent = {
        "rank_up", "rank_end_info", "rank_last_heartbeat_timestamp_seconds", "loss", "grad_norm",
        "overhead_ratio", "loss_scale", "sample_interval_steps",
        "sites_observed", "sites_expected", "rank_resident_memory_bytes", "rank_cpu_seconds_total",
        "global_grad_norm", "site_abs_max", "first_failure_timestamp_seconds", "host_cpu_ratio",
        "upload_lag_seconds", "upload_failures_total", "first_cause_info",
        "first_cause_timestamp_seconds", "nodes_expected", "node_last_block_timestamp_seconds",
    }  # fmt: skip
    assert names & absent == set()


def test_a_dead_rank_and_a_nan_loss_are_shown_as_they_are() -> None:
    view = a_view(ranks=(a_rank(0, up=False, end="SIGKILL", loss=math.nan), a_rank(1)))
    assert value(view, "rank_up", rank="0") == 0
    assert value(view, "rank_end_info", rank="0", signal="SIGKILL") == 1
    assert value(view, "rank_end_info", rank="1", signal="") is None
    assert math.isnan(value(view, "loss", rank="0") or 0.0)


def test_counters_start_at_zero() -> None:
    fresh = RankView(rank=0, local_rank=0, pid=1, device="cpu")
    got = series(a_view(ranks=(fresh,)))
    zeros = {
        ("nonfinite_elements_total", (("kind", k), ("rank", "0"))) for k in COUNTED_KINDS
    } | {
        ("anomalies_total", (("detector", d), ("level", x)))
        for d in ("nonfinite", "rank_lost") for x in LEVELS
    } | {("rank_anomalies_total", (("level", x), ("rank", "0"))) for x in LEVELS} | {
        ("step_phase_seconds_total", (("phase", p), ("rank", "0"))) for p in STEP_PHASES
    } | {("steps_total", (("rank", "0"),)), ("series_dropped_total", ())}  # fmt: skip
    for name, labels in zeros:
        assert got[f"ddpprobe_{name}", labels] == 0, (name, labels)


def test_only_the_head_counts_anomalies() -> None:
    names = {s.name for s in samples(a_view(is_head=False))}
    assert not {"ddpprobe_anomalies_total", "ddpprobe_rank_anomalies_total"} & names


def test_a_component_is_down_if_it_is_down_anywhere() -> None:
    view = a_view()
    assert value(view, "component_up", component="hooks") == 0
    assert value(view, "component_up", component="journal") == 1
    assert value(view, "component_up", component="gather") == 1


def test_global_norm_adds_sharded_and_replicated_gradients_once() -> None:
    sites = [
        Site("a", "grad", placement="replicated"),
        Site("b", "grad", placement="sharded"),
        Site("d", "grad_local"),
        Site("blind", "grad", placement="unknown"),
    ]
    view = a_view(merged=record(sites, unobserved=(3,)))
    assert value(view, "global_grad_norm") == pytest.approx(math.sqrt(4 * 1 + 4 * 4))


@pytest.mark.parametrize("placement", ["partial", "unknown", "local"])
def test_global_norm_is_absent_where_a_part_of_it_is_not_known(placement: str) -> None:
    sites = [Site("a", "grad", placement="replicated"), Site("c", "grad", placement=placement)]
    assert value(a_view(merged=record(sites)), "global_grad_norm") is None
    for missing, alone in (((), math.sqrt(4 + 16)), ((1,), None)):
        view = a_view(merged=record(sites, ranks=(0,), missing=missing))
        known = placement == "local"  # one rank's local gradient is the gradient
        got = value(view, "global_grad_norm")
        assert got == (pytest.approx(alone) if alone and known else None)


@pytest.mark.parametrize(
    ("changes", "norm"),
    [
        ({"nan": {0: 1}}, math.nan),
        ({"missing": (2,)}, None),
        ({"unobserved": (0, 1)}, None),
        ({"unobserved": (1,)}, 2.0),
    ],
)
def test_global_norm_is_never_a_guess(changes: dict[str, object], norm: float | None) -> None:
    sites = [
        Site("a", "grad", placement="sharded"),
        Site("b", "grad", placement="sharded"),
    ]
    got = value(a_view(merged=record(sites, **changes)), "global_grad_norm")  # type: ignore[arg-type]
    assert got == norm or (norm is not None and math.isnan(norm) and math.isnan(got or 0.0))


def test_sites_come_from_the_merged_step() -> None:
    sites = [
        Site("m", "output", leaf="0"),
        Site("m", "output", leaf="1"),
        Site("seen", "input"),
        Site("blind", "input"),
        Site("tp", "output", placement="partial"),
        Site("tp2", "output", placement="unknown"),
        Site("all_nan", "output"),
        Site("", "output"),
        Site("w", "param", placement="replicated"),  # of this one the next record has none
        Site("w", "update", placement="replicated"),
    ]
    view = a_view(merged=record(sites, unobserved=(3,), nan={6: 4}))
    got = {s.labels["fqn"]: s.value for s in samples(view) if s.name == "ddpprobe_site_abs_max"}
    assert got == {"m": 2.0, "seen": 3.0, "(root)": 8.0}  # the leaves as one; no data is no number
    assert value(view, "site_rms", fqn="m", kind="output") == pytest.approx(math.sqrt(20 / 8))


def test_the_ranks_that_site_values_lack_are_counted_beside_them() -> None:
    merged = record([Site("m", "output")])
    assert value(a_view(merged=merged), "missing_ranks") == 0
    lacking = replace(merged, missing=(5, 6))
    assert value(a_view(merged=lacking), "missing_ranks") == 2
    assert not [s for s in samples(a_view()) if s.name == "ddpprobe_missing_ranks"]


def test_the_cap_keeps_ranks_then_sites_in_execution_order_and_counts_the_rest() -> None:
    view = a_view(merged=record([Site(f"m{i:04d}", "output") for i in range(4000)]))
    exposition = Exposition()
    lines = [x for x in exposition.render(view, False).decode().splitlines() if x[0] != "#"]
    assert len(lines) == 5000
    # missing_ranks and the places of the first modules come with the merged step.
    total = len(series(a_view())) + 1 + POSITIONS + 3 * 4000
    shown = {s.labels["fqn"] for s in samples(view) if s.name == "ddpprobe_site_abs_max"}
    assert shown == {f"m{i:04d}" for i in range(len(shown))}
    places = {s.labels["fqn"]: s.value for s in samples(view) if s.name == "ddpprobe_site_position"}
    assert places == {f"m{i:04d}": i for i in range(POSITIONS)}
    refused = total - 5000
    assert f"ddpprobe_series_dropped_total {float(refused)}" in lines
    # Neither the other format nor the next view counts a series twice; only more of them count.
    said = f"series_dropped_total {float(refused)}\n".encode()
    assert said in exposition.render(view, True)
    assert said in exposition.render(replace(view, time_ns=99 * SECOND), False)
    assert said in exposition.render(a_view(), False)
    assert said in exposition.render(view, False)
    more = a_view(merged=record([Site(f"m{i:04d}", "output") for i in range(4001)]))
    assert f"_total {float(refused + 3)}\n".encode() in exposition.render(more, False)


def test_blocks_then_gradients_have_room_before_the_outputs_of_leaves() -> None:
    blocks = [f"blocks.{i}" for i in range(2)]
    leaves = [f"{block}.{leaf}" for block in blocks for leaf in ("up", "down")]
    outputs = [Site(fqn, "output") for fqn in [*leaves, *blocks]]
    gradients = [Site(fqn, "grad_output") for fqn in reversed([*leaves, *blocks])]
    of_parameters = [Site(f"{fqn}.weight", "grad") for fqn in leaves]
    view = a_view(merged=record([*outputs, *gradients, *of_parameters]))
    per_rank = len(series(view)) - 3 * len(outputs + gradients + of_parameters)

    def shown(sites: int) -> set[tuple[str, str]]:
        lines = Exposition(per_rank + 3 * sites).render(view, False).decode().splitlines()
        found = [re.match(r'ddpprobe_site_rms{fqn="(.*)",kind="(.*)"}', line) for line in lines]
        return {(match[1], match[2]) for match in found if match}

    of_blocks = {(fqn, kind) for fqn in blocks for kind in ("output", "grad_output")}
    of_gradients = {(fqn, "grad_output") for fqn in leaves} | {
        (site.fqn, "grad") for site in of_parameters
    }
    assert shown(4) == of_blocks
    assert shown(12) == of_blocks | of_gradients
    assert shown(13) == of_blocks | of_gradients | {(leaves[0], "output")}


def test_a_site_that_was_not_observed_once_is_absent_once() -> None:
    """What is kept from one rendering to the next are names, never values."""
    sites = [Site("m", "output"), Site("n", "output"), Site("n", "output", leaf="1")]
    exposition = Exposition()
    for unobserved, known in (
        ((), {"m", "n"}),
        ((0,), {"n"}),
        ((), {"m", "n"}),
        ((0, 1, 2), set()),
    ):
        for nan in ({}, {0: 4}):
            view = a_view(merged=record(sites, unobserved=unobserved, nan=nan))
            for openmetrics in (True, False):
                body = exposition.render(view, openmetrics)
                assert body == render(view, openmetrics)
                shown = {n for n in "mn" if f'site_rms{{fqn="{n}"' in body.decode()}
                assert shown == known - ({"m"} if nan else set())
    assert b"site_" not in exposition.render(a_view(), False)


def test_a_histogram_is_one_of_all_steps_so_far_and_has_all_of_its_buckets_or_none() -> None:
    x = np.array([0.0, -0.5, 0.5, 3.0, np.nan, np.inf, 2.0**-38])
    site = Site("mlp", "output")
    counts, values = empty_rows(1)
    counts[0] = [x.size, 1, 1, 0, 1, 1, 1]
    bins = np.histogram(x[np.isfinite(x) & (x != 0)], EDGES)[0][None]
    merged = StepRecord(0, 1, (0,), 0, sites=(site,), counts=counts, values=values,
                        binned=np.array([0]), bins=bins)  # fmt: skip
    fold = Magnitudes()
    for _ in range(3):
        fold.update(merged)
    view = a_view(magnitudes={**fold.now, ("other", "output"): fold.now["mlp", "output"]})
    for openmetrics in (False, True):
        found = [s for s in samples(view, openmetrics=openmetrics) if "magnitude" in s.name]
        mine = {float(s.labels["le"]): s.value for s in found if s.labels["fqn"] == "mlp"}
        assert list(mine) == sorted(mine)
        assert mine[2.0**-36] == 3 * 2
        assert (mine[0.25], mine[1.0], mine[4.0], mine[np.inf]) == (6, 12, 15, 21)
    text = render(view, False).decode()
    assert "# TYPE ddpprobe_site_magnitude histogram" in text
    before = text[: text.index("# HELP ddpprobe_site_magnitude")]
    others = len([x for x in before.splitlines() if x[0] != "#"])
    for room in (len(LE) - 1, len(LE), 2 * len(LE) - 1):
        exposition = Exposition(others + 1 + room)
        shown = exposition.render(view, False).decode().count("site_magnitude_bucket{")
        assert shown == room // len(LE) * len(LE)


def test_outputs_have_histograms_before_gradients_where_not_all_have_room() -> None:
    counts = np.arange(len(LE))
    weights = {(f"blocks.{i}.weight", "grad_local"): counts for i in range(MAGNITUDES)}
    outputs = {(f"blocks.{i}", "output"): counts for i in range(3)}
    shown = {
        (s.labels["fqn"], s.labels["kind"])
        for s in samples(a_view(magnitudes={**weights, **outputs}))
        if s.name == "ddpprobe_site_magnitude_bucket"
    }
    assert shown == {*outputs, *list(weights)[: MAGNITUDES - 3]}


def test_a_small_cap_holds_even_for_the_ranks() -> None:
    body = Exposition(limit=20).render(a_view(), False).decode()
    assert len([x for x in body.splitlines() if x[0] != "#"]) == 20


def test_the_number_of_series_per_rank_and_node_is_as_planned() -> None:
    one, two = (len(series(a_view(ranks=tuple(map(a_rank, range(n)))))) for n in (1, 2))
    assert two - one <= 32
    assert one - (two - one) <= 90


def test_above_1024_ranks_a_node_joins_what_names_no_culprit() -> None:
    ranks = (a_rank(8), a_rank(9, nonfinite={"output": 5}, resident_bytes=3000, cpu_seconds=9.0,
                                loss_scale=64.0, sites_observed=2, skipped_steps=6))  # fmt: skip
    by_rank = series(a_view(ranks=ranks, world_size=JOINED_ABOVE))
    joined = series(a_view(ranks=ranks, world_size=JOINED_ABOVE + 1))
    table = {m.name: m for m in METRICS}
    world = "ddpprobe_job_info"  # its label says how large the job is
    kept, left = (
        {key for key in each if not table[key[0]].joined and key[0] != world}
        for each in (by_rank, joined)
    )
    assert kept == left
    assert {dict(labels)["rank"] for name, labels in joined if table[name].joined} == {"8-9"}

    view = a_view(ranks=ranks, world_size=JOINED_ABOVE + 1)
    assert value(view, "nonfinite_elements_total", rank="8-9", kind="output") == 8
    assert value(view, "nonfinite_elements_total", rank="8-9", kind="param") == 0
    assert value(view, "rank_resident_memory_bytes", rank="8-9") == 3000
    assert value(view, "rank_cpu_seconds_total", rank="8-9") == 7
    assert value(view, "loss_scale", rank="8-9") == 64
    assert value(view, "sites_observed", rank="8-9") == 2
    assert value(view, "sites_expected", rank="8-9") == 10
    assert value(view, "skipped_steps_total", rank="8-9") == 6


def test_above_1024_ranks_a_rank_has_at_most_13_series() -> None:
    nodes = [
        a_view(ranks=tuple(map(a_rank, range(n))), world_size=JOINED_ABOVE + 1, is_head=False)
        for n in (1, 2)
    ]
    one, two = map(len, map(series, nodes))
    assert two - one <= 13


def test_a_joined_number_is_of_ranks_that_are_known_and_a_mean_of_all() -> None:
    dead = a_rank(1, resident_bytes=None, cpu_seconds=None, loss_scale=None)
    view = a_view(ranks=(a_rank(0, loss_scale=None), dead), world_size=JOINED_ABOVE + 1)
    assert value(view, "rank_resident_memory_bytes", rank="0-1") == 1000
    # Over the rank that is left alone it would begin anew, which a rate takes for work.
    assert value(view, "rank_cpu_seconds_total", rank="0-1") is None
    assert value(view, "loss_scale", rank="0-1") is None
    assert series(a_view(ranks=(), world_size=JOINED_ABOVE + 1))


@pytest.mark.parametrize(
    ("ranks", "label"),
    [([], ""), ([3], "3"), ([3, 2], "2-3"), ([0, 1, 2, 6], "0-2,6"), ([9, 7, 5], "5,7,9")],
)
def test_ranks_are_one_word(ranks: list[int], label: str) -> None:
    assert ranks_label(ranks) == label


def test_the_exemplar_names_the_tensor_in_openmetrics_only() -> None:
    view = rich_view()
    found = [s for s in samples(view, openmetrics=True) if s.exemplar]
    assert [(s.name, s.labels) for s in found] == [
        ("ddpprobe_anomalies_total", {"detector": "nonfinite", "level": "page"})
    ]
    exemplar = found[0].exemplar
    assert exemplar is not None
    want = {"step": "412", "fqn": "layers.17.attn.wo", "kind": "grad_output", "rank": "5"}
    assert (exemplar.labels, float(exemplar.timestamp or 0)) == (want, 55)
    assert b" # {" not in render(view, False)


def test_an_anomaly_without_rank_or_module_leaves_them_out() -> None:
    exemplar = exemplar_of(an_anomaly(rank=None, module=None, kind=None, wall_time_ns=0))
    assert (exemplar.labels, exemplar.timestamp) == ({"step": "412"}, None)


@given(st.text(st.characters(), max_size=400), st.integers(0, 2**62), st.integers(0, 2**31))
def test_an_exemplar_has_at_most_128_characters(fqn: str, step: int, rank: int) -> None:
    labels = exemplar_of(an_anomaly(module=fqn, step=step, rank=rank)).labels
    assert sum(len(k) + len(v) for k, v in labels.items()) <= EXEMPLAR_CHARACTERS
    assert labels["step"] == str(step)


def test_a_long_name_is_cut_from_the_left() -> None:
    assert label_value("x" * 500 + ".wo").endswith("x.wo")
    assert len(label_value("é" * 500).encode()) <= LABEL_BYTES
    assert exemplar_of(an_anomaly(module="y" * 500 + ".wo")).labels["fqn"].endswith("y.wo")
    assert label_value("layers.0") == "layers.0"


HOSTILE = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from('"\\\n\r\0\u2028\ud800\udfff{}#= '),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=4), HOSTILE)
def test_hostile_names_come_back_as_they_were(names: list[str], other: str) -> None:
    sites = [Site(name, "output") for name in dict.fromkeys(names)]
    view = a_view(
        run_id=other,
        directory=other,
        ranks=(a_rank(0, device=other),),
        merged=record(sites),
        first_failure=FirstFailure(0, other, SECOND),
        records_dropped={other: 1},
        anomalies={(other, "page"): 1},
        exemplars={(other, "page"): an_anomaly(module=other)},
    )
    for openmetrics in (False, True):
        got = samples(view, openmetrics=openmetrics)
        shown = {s.labels["fqn"] for s in got if s.name == "ddpprobe_site_abs_max"}
        assert shown == {label_value(name or "(root)") for name in names}
        runs = [s.labels["run_id"] for s in got if s.name == "ddpprobe_job_info"]
        assert runs == [label_value(other)]


def test_prometheus_takes_hostile_names() -> None:
    names = [
        '"} 1\nfake_metric 2',
        "a\\",
        "\ud800",
        "x\r\ny",
        "\0",
        "# HELP x",
        "\u2028",
        "z" * 999,
    ]
    view = a_view(merged=record([Site(name, "output") for name in names]))
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=render(view, False),
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
    assert not any(s.name == "fake_metric" for s in samples(view))


def test_names_that_become_equal_are_shown_once_and_counted() -> None:
    tail = "z" * 300
    view = a_view(merged=record([Site(f"{i}{tail}", "output") for i in range(3)]))
    assert len([s for s in samples(view) if s.name == "ddpprobe_site_rms"]) == 1
    assert value(view, "series_dropped_total") == 6
    assert len([s for s in samples(view) if s.name == "ddpprobe_site_position"]) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_component_that_is_off_on_one_rank_is_off_whatever_rank_comes_behind(
    order: tuple[int, ...],
) -> None:
    ranks = tuple(a_rank(n, components={"hooks": n != 1, "journal": True}) for n in order)
    view = a_view(ranks=ranks, components={"hooks": True, "store": False})
    said = {
        name: value(view, "component_up", component=name) for name in ("hooks", "journal", "store")
    }
    assert said == {"hooks": 0, "journal": 1, "store": 0}


@pytest.mark.parametrize(
    ("identity", "label"),
    [
        ({"run_id": "20261123T034628Z-a1b2c3", "name": "20261123T034628Z-a1b2c3"},
         "20261123T034628Z-a1b2c3"),
        ({"run_id": "20261123T034628Z-a1b2c3", "name": "gpt"}, "gpt-a1b2c3"),
        ({"run_id": "20261123T034628Z-a1b2c3"}, "20261123T034628Z-a1b2c3"),
        ({"run_id": "20261123T034628Z-a1b2c3", "name": "a\nb"}, "a\\nb-a1b2c3"),
        ({"name": "gpt"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_label_of_a_run_is_its_name_and_what_no_other_has(identity, label) -> None:
    assert run_label(identity) == label


def test_no_metric_has_the_label_that_discovery_gives() -> None:
    assert not [m.name for m in METRICS if "run" in m.labels]


def test_the_directory_can_be_typed_however_long_it_is() -> None:
    long = "/scratch" + "/deep" * 300 + "/run"
    (info,) = [s for s in samples(a_view(directory=long)) if s.name == "ddpprobe_job_info"]
    assert info.labels["directory"] == long
    assert len(label_value("/x" * PATH_BYTES, PATH_BYTES).encode()) <= PATH_BYTES


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({}, {"rank": "5", "fqn": "layers.17.attn.wo", "kind": "grad_output"}),
        ({"module": ""}, {"rank": "5", "fqn": "(root)", "kind": "grad_output"}),
        ({"rank": None, "module": None, "kind": None}, {"rank": "", "fqn": "", "kind": ""}),
    ],
)
def test_the_first_cause_is_one_series_and_what_is_unknown_of_it_is_empty(changes, labels) -> None:
    cause = first_cause_of(an_anomaly(**changes))
    (info,) = [s for s in samples(a_view(first_cause=cause)) if s.name.endswith("cause_info")]
    place = {"detector": "nonfinite", "step": "412", "phase": "backward"}
    assert (info.labels, info.value) == (place | labels, 1)
    assert value(a_view(first_cause=cause), "first_cause_timestamp_seconds") == 55
