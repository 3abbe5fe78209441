"""The Ranks dashboard: which rank or node is not like the others, and in what."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from ddpprobe.metrics.table import JOINED_ABOVE
from grafana.board import Placed, Row, of_one_run, placed
from grafana.panels import (
    RED,
    THRESHOLD,
    Column,
    Properties,
    Query,
    graph_panel,
    table_panel,
    worded,
)
from grafana.queries import (
    BANDS,
    BY_NODE,
    NO_DATA,
    NODE,
    OWN_SECONDS,
    RANK,
    RANK_STATES,
    ROWS,
    UP,
    WORST,
    at_the_end,
    beat_age,
    by_rank,
    events,
    metric,
    none_of,
    rank_state,
    rate,
    seconds_a_step,
)

UID = "ddpprobe-ranks"
# The wait for other ranks is in the backward pass, in the reduction of the gradients.
WAITING = seconds_a_step(f'{RANK},phase="backward"')
DATA = seconds_a_step(f'{RANK},phase="data"')
COMPARED = {
    "own work": OWN_SECONDS,
    "gradient norm": metric("grad_norm", RANK),
    "memory": metric("rank_resident_memory_bytes", RANK),
}
FAR = 2.0  # times the median of the others: from here on it is not like the others


def to_median(value: str) -> str:
    """Return how many times the others' value each rank (label `rank`) has; without NaN.

    That is the median of all but the highest one, which is compared so with all others: of two
    ranks, it is measured by the other one.
    """
    finite = f"max by (rank) (({value}) == ({value}))"
    others = f"(quantile(0.5, {finite} unless topk(1, {finite})) or quantile(0.5, {finite}))"
    return f"{finite} / on () group_left () ({others} > 0)"


def _worst() -> list[Placed]:
    pages = metric("rank_anomalies_total", f'{RANK},level=~"page|warn"')
    info = metric("rank_info", RANK)
    # While no step is taken there is no own work, but there are ranks. Who is waited for comes
    # before who is gone or waits, and these before all others.
    work = f"({to_median(COMPARED['own work'])} or 0 * max by (rank) ({info}))"
    scored = f"{work} + on (rank) 1000 * ({rank_state()} - {UP})"
    shown = f"and on (rank) topk({ROWS}, {at_the_end(scored)})"
    who = f"max by (rank, instance, device, pid) ({info})"
    red: Properties = {
        "custom.cellOptions": {"type": "color-background", "mode": "basic"},
        "custom.width": 150,
        "decimals": 2,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": None, "color": "transparent"}, {"value": FAR, "color": RED}],
        },
    }

    def of(expr: str) -> Query:
        return Query(f"{at_the_end(f'max by (rank) ({expr})')} {shown}")

    return [
        (
            table_panel(
                "The worst ranks",
                f"The {ROWS} ranks that are waited for or gone, then those with most own work. What is compared is in multiples of the median of all but the highest rank: red from {FAR:g} on. "
                "Much own work makes all others wait; a high gradient norm or a verdict points to its data or hardware. "
                f"Above {JOINED_ABOVE:,} ranks memory is known by node only, and empty here.",
                "none",
                [
                    Column("rank"),
                    Column("instance"),
                    Column("device"),
                    Column("pid"),
                    Column("", Query(f"{at_the_end(who)} {shown}")),
                    Column(
                        "state", Query(f"{at_the_end(rank_state())} {shown}"), worded(RANK_STATES)
                    ),
                    Column("work / median", of(to_median(COMPARED["own work"])), red),
                    Column("norm / median", of(to_median(COMPARED["gradient norm"])), red),
                    Column("memory / median", of(to_median(COMPARED["memory"])), red),
                    Column("own work", of(OWN_SECONDS), {"unit": "s"}),
                    Column("backward", of(WAITING), {"unit": "s"}),
                    Column(
                        "memory",
                        of(metric("rank_resident_memory_bytes", RANK)),
                        {"unit": "bytes", "decimals": 1},
                    ),
                    Column(
                        "verdicts",
                        Query(f"{at_the_end(f'sum by (rank) ({pages})')} {shown}"),
                        {"decimals": 0},
                    ),
                ],
                "state",
                then_by="work / median",
            ),
            24,
        )
    ]


def _compared() -> list[Placed]:
    return [
        (
            graph_panel(
                f"{name.capitalize()}, compared",
                f"In multiples of the median of all ranks but the highest. Above the dashed line for long: look at that rank's data, device and neighbours. {BANDS}",
                "none",
                [
                    *by_rank(to_median(value)),
                    Query(f"vector({FAR:g})", "not like the others", style=THRESHOLD),
                ],
            ),
            8,
        )
        for name, value in COMPARED.items()
    ]


def _work() -> list[Placed]:
    return [
        (
            graph_panel(
                "Own work per step",
                f"Data, forward and optimizer. The rank with the most makes the others wait. {BANDS}",
                "s",
                by_rank(OWN_SECONDS),
            ),
            8,
        ),
        (
            graph_panel(
                "Backward per step, with the wait",
                f"The rank with the shortest one waits least: it is the straggler. {BANDS}",
                "s",
                by_rank(WAITING),
            ),
            8,
        ),
        (
            graph_panel(
                "Wait for data per step",
                f"Between the end of a step and the next forward. Much on all ranks: feed them faster; on one: its disk or its workers. {BANDS}",
                "s",
                by_rank(DATA),
            ),
            8,
        ),
    ]


def _numbers() -> list[Placed]:
    blamed = events("rank_anomalies_total", f'{RANK},level=~"page|warn"')
    most = f"topk({WORST}, round(sum by (rank) ({blamed})) > 0)"
    return [
        (
            graph_panel(
                "Gradient norm before the reduction",
                f"Of each rank's own gradients. The rank that leaves the others has other data, or a fault. {BANDS}",
                "short",
                by_rank(metric("grad_norm", RANK)),
                log=True,
            ),
            8,
        ),
        (
            graph_panel(
                "Verdicts by rank",
                f"The {WORST} ranks that detectors blamed most, warnings and pages. Many on one rank: its data or its hardware. None is good.",
                "none",
                [Query(most, "rank {{rank}}"), none_of(most)],
                bars=True,
                no_value=NO_DATA,
            ),
            8,
        ),
        (
            graph_panel(
                "Age of the heartbeat",
                f"Since the last sign of life, as its daemon saw it. Growing on one rank alone while its process is up: it hangs, look at its stack. {BANDS}",
                "s",
                by_rank(beat_age(RANK)),
            ),
            8,
        ),
    ]


def _processes() -> list[Placed]:
    return [
        (
            graph_panel(
                "Resident memory",
                f"Of each rank's process. Growing all the time: a leak; the kernel ends it when the node has none left. {BY_NODE}",
                "bytes",
                by_rank(metric("rank_resident_memory_bytes", RANK)),
            ),
            8,
        ),
        (
            graph_panel(
                "CPU",
                f"Cores that each rank's process keeps busy. One rank far below the others waits; far above, it does more than they. {BY_NODE}",
                "none",
                by_rank(rate("rank_cpu_seconds_total", RANK)),
            ),
            8,
        ),
        (
            graph_panel(
                "Overhead of ddpprobe",
                f"What it adds to a step, by the step's own time. Too much: give budget= or raise every=. {BY_NODE}",
                "percentunit",
                by_rank(metric("overhead_ratio", RANK)),
            ),
            8,
        ),
    ]


def _nodes() -> list[Placed]:
    return [
        (
            graph_panel(
                "CPU by node",
                f"Busy share; the {WORST} busiest nodes. At 1 the data loader starves the ranks.",
                "percentunit",
                [Query(_most("host_cpu_ratio"), "{{instance}}")],
                soft_max=1,
            ),
            6,
        ),
        (
            graph_panel(
                "Load by node",
                f"Processes that run or wait, of one minute; the {WORST} highest. Above the number of cores they wait.",
                "none",
                [Query(_most("host_load1"), "{{instance}}")],
            ),
            6,
        ),
        (
            graph_panel(
                "Memory left by node",
                f"What the node, or its container, can still give; the {WORST} lowest. Near 0 the kernel kills a rank (SIGKILL).",
                "bytes",
                [Query(_least("host_memory_available_bytes"), "{{instance}}")],
            ),
            6,
        ),
        (
            graph_panel(
                "Disk left by node",
                f"Where the run directory lies; the {WORST} lowest. At 0 records are dropped and training goes on.",
                "bytes",
                [Query(_least("host_disk_free_bytes"), "{{instance}}")],
            ),
            6,
        ),
    ]


def _most(name: str) -> str:
    found = metric(name, NODE)
    return f"{found} and topk({WORST}, max_over_time({found}[$__range] @ end()))"


def _least(name: str) -> str:
    found = metric(name, NODE)
    return f"{found} and bottomk({WORST}, min_over_time({found}[$__range] @ end()))"


ROWS_OF_PANELS = (
    Row("", 9, False, _worst),
    Row("Not like the others", 7, False, _compared),
    Row("Who makes the others wait", 7, False, _work),
    Row("Numbers and signs of life", 7, False, _numbers),
    Row("Processes", 7, False, _processes),
    Row("Nodes", 7, False, _nodes),
)


def build() -> dashboard.Dashboard:
    """Return the whole dashboard."""
    text = "The ranks and nodes of one run: which is not like the others, and in what."
    return placed(of_one_run(UID, "ranks", text, by_rank=True), ROWS_OF_PANELS)
