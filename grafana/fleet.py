"""The Fleet dashboard: every run that this Prometheus knows, worst first; a click leads to Run."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from grafana import alerts, run
from grafana.board import Placed, Row, filtered, frame, placed
from grafana.panels import (
    BLUE,
    GREEN,
    PURPLE,
    RED,
    STEPS_PER_SECOND,
    THRESHOLD,
    Column,
    Query,
    graph_panel,
    stat_panel,
    steps,
    table_panel,
    timeline_panel,
    worded,
)
from grafana.queries import (
    FAILED,
    NO_ANSWER,
    ROWS,
    SHOWN_STATES,
    STATES_WITH_FAULT,
    at_the_end,
    in_words,
    lasting_causes,
    metric,
    rate,
    state,
    with_fault,
)

UID = "ddpprobe-fleet"
ALL = 'job=~"$job"'
BY = "job, run"
NAME = "{{run}} ({{job}})"
HOVER = "Point at a line for the names."
LINK = f"/d/{run.UID}?var-job=${{__data.fields.job:percentencode}}&var-run=${{__data.fields.run:percentencode}}&${{__url_time_range}}"
STATE = at_the_end(state(ALL, BY))
SEEN = metric("last_collect_timestamp_seconds", ALL)
# The runs that are drawn: those that were seen last. It is decided once, at the end of the shown
# time.
DRAWN = f"and on ({BY}) topk({ROWS}, max by ({BY}) (max_over_time({SEEN}[$__range] @ end())))"


def _count(condition: str) -> Query:
    return Query(f"count({condition}) or vector(0)", "runs", instant=True)


def _numbers() -> list[Placed]:
    red, purple = steps((None, GREEN), (1, RED)), steps((None, GREEN), (1, PURPLE))
    return [
        (
            stat_panel(
                "Runs",
                "Runs that were seen in the shown time, whatever became of them.",
                "none",
                [_count(STATE)],
                steps((None, BLUE)),
            ),
            6,
        ),
        (
            stat_panel(
                "Running",
                "Runs that train now, or did when they were last seen.",
                "none",
                [_count(f"{STATE} == 1")],
                steps((None, BLUE), (1, GREEN)),
            ),
            6,
        ),
        (
            stat_panel(
                "Failed or hung",
                "Runs that crashed, hang, vanished, or ended in a way that is not known. Above 0: click the run in the table.",
                "none",
                [_count(f"{STATE} >= {FAILED} < {NO_ANSWER}")],
                red,
            ),
            6,
        ),
        (
            stat_panel(
                "Do not answer",
                "Runs that trained when they were last seen, and whose node does not answer. Above 0: the node is gone, or the way to it.",
                "none",
                [_count(f"{STATE} == {NO_ANSWER}")],
                purple,
            ),
            6,
        ),
    ]


def _table() -> list[Placed]:
    newest = in_words(
        f"topk by ({BY}) (1, {lasting_causes(ALL, f'{BY}, detector, step, rank, fqn, kind, phase')})"
    )
    said = f'label_join({newest}, "verdict", "", "detector", "where", "who", "when")'
    loss = metric("loss", ALL)
    link = {"links": [{"title": "Open the run", "url": LINK, "targetBlank": False}]}

    def of(expr: str) -> Query:
        return Query(at_the_end(expr))

    return [
        (
            table_panel(
                "Runs, the worst first",
                "One line per run: what it is and whether a fault was found, the first cause of its newest fault and when that was seen, how far it came. Click a run to open it.",
                "none",
                [
                    Column("job"),
                    Column("run", properties={"custom.width": 240, **link}),
                    Column(
                        "state",
                        Query(with_fault(STATE, lasting_causes(ALL, BY), BY)),
                        {**worded(STATES_WITH_FAULT), "custom.width": 190},
                    ),
                    Column("verdict", properties={"custom.width": 380}),
                    Column(
                        "since",
                        Query(f"1000 * max by ({BY}, verdict) ({said})"),
                        {"unit": "dateTimeAsIso", "custom.width": 170},
                    ),
                    Column("ranks", of(f"count by ({BY}) ({metric('rank_info', ALL)})")),
                    Column("step", of(f"min by ({BY}) ({metric('steps_total', ALL)})")),
                    Column(
                        "steps/s",
                        of(f"min by ({BY}) ({rate('steps_total', ALL)})"),
                        {"decimals": 2},
                    ),
                    Column("loss", of(f"min by ({BY}) ({loss} == {loss})"), {"decimals": 3}),
                    Column(
                        "overhead",
                        of(f"max by ({BY}) ({metric('overhead_ratio', ALL)})"),
                        {"unit": "percentunit", "decimals": 1},
                    ),
                ],
                "state",
                finest=True,
            ),
            24,
        )
    ]


def _over_time() -> list[Placed]:
    return [
        (
            timeline_panel(
                "State by run",
                f"What each of the {ROWS} newest runs was. Red: open it in the table above.",
                [Query(f"{state(ALL, BY)} {DRAWN}", NAME)],
                SHOWN_STATES,
            ),
            24,
        )
    ]


def _pace() -> list[Placed]:
    overhead = f"max by ({BY}) ({metric('overhead_ratio', ALL)})"
    cpu = f"max by ({BY}) ({metric('host_cpu_ratio', ALL)})"
    return [
        (
            graph_panel(
                "Steps per second",
                f"Of the slowest rank of each of the {ROWS} newest runs. One that falls: open its dashboard. {HOVER}",
                STEPS_PER_SECOND,
                [Query(f"min by ({BY}) ({rate('steps_total', ALL)}) {DRAWN}", NAME)],
                legend=False,
            ),
            8,
        ),
        (
            graph_panel(
                "Overhead of ddpprobe",
                f"What it adds to a step on the worst rank. Above the dashed line for {alerts.OVERHEAD_WAIT}, and more than {alerts.OVERHEAD_SECONDS * 1000:g} ms in each step, an alert fires: give that run budget= or raise every=. {HOVER}",
                "percentunit",
                [
                    Query(f"{overhead} {DRAWN}", NAME),
                    Query(f"vector({alerts.OVERHEAD})", "too much", style=THRESHOLD),
                ],
                legend=False,
            ),
            8,
        ),
        (
            graph_panel(
                "CPU of the busiest node",
                f"Of each run. At 1 for long, and several runs on it: they slow each other down. {HOVER}",
                "percentunit",
                [Query(f"{cpu} {DRAWN}", NAME)],
                legend=False,
                soft_max=1,
            ),
            8,
        ),
    ]


ROWS_OF_PANELS = (
    Row("", 4, False, _numbers),
    Row("Runs", 10, False, _table),
    Row("Over time", 8, False, _over_time),
    Row("Pace", 7, False, _pace),
)


def build() -> dashboard.Dashboard:
    """Return the whole dashboard."""
    made = frame(
        UID, "fleet", "All runs of this Prometheus: which is not well, and how fast they are."
    )
    jobs = filtered("job", "Job", "label_values(ddpprobe_job_info, job)")
    return placed(made.with_variable(jobs), ROWS_OF_PANELS)
