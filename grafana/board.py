"""What all dashboards have in common: variables, annotations, links, and the places of panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from grafana.alerts import RUNBOOK_BASE
from grafana.panels import AMBER, BLUE, DATASOURCE, GREEN, GREY, PURPLE, RED
from grafana.queries import NODE, PAGE, RUN, events, metric

TAG = "ddpprobe"
Placed = tuple[Any, int]  # a panel and its width in columns of 24


class Row(NamedTuple):
    """Panels side by side, below a title if it has one."""

    title: str
    height: int
    collapsed: bool
    panels: Callable[[], Sequence[Placed]]


def frame(uid: str, title: str, text: str) -> dashboard.Dashboard:
    """Return a dashboard with the links and the data source of all of them, and nothing else."""
    runbooks = (
        dashboard.DashboardLink("Runbooks")
        .type(models.DashboardLinkType.LINK)
        .url(f"{RUNBOOK_BASE}/DdpprobeFirstCause.md")
        .icon("doc")
        .tooltip("What to do about a first cause; each alert has a page beside it")
        .target_blank(target_blank=True)
    )
    return (
        dashboard.Dashboard(f"ddpprobe: {title}")
        .uid(uid)
        .description(text)
        .tags([TAG])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone(common_models.TimeZoneBrowser)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .link(
            dashboard.DashboardLink("ddpprobe")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(as_dropdown=False)
            .keep_time(keep_time=True)
            .include_vars(include_vars=True)
        )
        .link(runbooks)
    )


def chosen(
    name: str, label: str, query: str, *, hidden: bool = False, newest: bool = False
) -> dashboard.QueryVariable:
    """Return a variable with one value of those that a query finds."""
    order = models.VariableSort
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .definition(query)
        .multi(multi=False)
        .include_all(include_all=False)
        .sort(order.ALPHABETICAL_DESC if newest else order.DISABLED)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    return made.hide(models.VariableHide.HIDE_VARIABLE) if hidden else made


def filtered(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with any number of the values that a query finds, by default all."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .definition(query)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all"))
        .sort(models.VariableSort.NUMERICAL_ASC)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def listed(name: str, label: str, values: Sequence[str]) -> dashboard.CustomVariable:
    """Return a variable with one of some fixed values, by default the first."""
    first, *_ = values
    return (
        dashboard.CustomVariable(name)
        .label(label)
        .values(",".join(values))
        .current(models.VariableOption(text=first, value=first))
        .options([models.VariableOption(selected=x == first, text=x, value=x) for x in values])
    )


def of_one_run(uid: str, title: str, text: str, *, by_rank: bool) -> dashboard.Dashboard:
    """Return the frame of a dashboard of one run: its variables and what happened in it."""
    made = frame(uid, title, text)
    made = made.with_variable(chosen("job", "Job", "label_values(ddpprobe_job_info, job)"))
    # Runs without a name begin with their date: the newest is the first.
    run = 'label_values(ddpprobe_job_info{job="$job"}, run)'
    made = made.with_variable(chosen("run", "Run", run, newest=True))
    nodes = f"label_values(ddpprobe_job_info{{{RUN}}}, instance)"
    made = made.with_variable(filtered("node", "Node", nodes))
    if by_rank:
        ranks = f"label_values(ddpprobe_rank_info{{{NODE}}}, rank)"
        made = made.with_variable(filtered("rank", "Rank", ranks))
    directory = f"label_values(ddpprobe_job_info{{{NODE}}}, directory)"
    made = made.with_variable(chosen("directory", "Directory", directory, hidden=True))
    for annotation in _annotations():
        made = made.annotation(annotation)
    return made


def _annotations() -> list[dashboard.AnnotationQuery]:
    info, when = (
        metric(name, NODE) for name in ("first_cause_info", "first_cause_timestamp_seconds")
    )
    cause = f"1000 * {info} * on (job, run, instance) group_left () {when}"
    failure = f"1000 * {metric('first_failure_timestamp_seconds', NODE)}"
    paged = f"max by (detector) ({events('anomalies_total', PAGE)}) > 0"
    begun = metric("job_info", NODE)
    ended = NODE + ',state!="running"'
    over = metric("job_state", ended)
    again = f"max by (state) ({events('restarts_total', NODE)}) > 0"
    ordered = NODE + ',action="capture"'
    captured = f"max by (action) ({events('orders_total', ordered)}) > 0"
    return [
        _annotation("First cause", cause, "{{detector}} step {{step}} {{fqn}}", RED, timed=True),
        _annotation("First failure", failure, "rank {{rank}} {{signal}}", GREY, timed=True),
        _annotation("Anomalies", paged, "{{detector}}", AMBER),
        _annotation(
            "Starts", f"max({begun}) unless max({begun} offset $__rate_interval)", "start", GREEN
        ),
        _annotation(
            "Ends",
            f"max by (state) ({over}) unless max by (state) ({over} offset $__rate_interval)",
            "{{state}}",
            BLUE,
        ),
        _annotation("Captures", captured, "full tensors are kept", PURPLE),
        _annotation("Restarts", again, "started again, it had {{state}}", PURPLE),
    ]


def _annotation(
    name: str, expr: str, title: str, color: str, *, timed: bool = False
) -> dashboard.AnnotationQuery:
    """Return an annotation; of a `timed` one the value is when it happened, in Unix ms."""
    target = prometheus.Dataquery().ref_id("A").expr(expr).range().interval("")
    made = (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(enable=True)
        .icon_color(color)
        .expr(expr)
        .title_format(title)
        .target(target)
    )
    return made.use_value_for_time(use_value_for_time=True) if timed else made


def placed(made: dashboard.Dashboard, rows: Sequence[Row]) -> dashboard.Dashboard:
    """Return the dashboard with its panels on the grid.

    Ids are 100 * row + place, so they stay when a row grows.
    """
    y = 0
    for number, (title, height, collapsed, panels) in enumerate(rows):
        row = None
        if title:
            grid = models.GridPos(x=0, y=y, w=24, h=1)
            row = dashboard.Row(title).id(100 * number).collapsed(collapsed).grid_pos(grid)
            y += 1
            if not collapsed:
                made = made.with_row(row)
        x = 0
        for place, (panel, width) in enumerate(panels(), 1):
            at = models.GridPos(x=x, y=y, w=width, h=height)
            panel = panel.id(100 * number + place).grid_pos(at)  # noqa: PLW2901
            x += width
            if row is not None and collapsed:
                row = row.with_panel(panel)
            else:
                made = made.with_panel(panel)
        if row is not None and collapsed:
            made = made.with_row(row)
        y += height
    return made
