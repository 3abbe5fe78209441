"""The Overview dashboard: one screen from "is it well?" to "which tensor, which rank?"."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from grafana.panels import (
    AMBER,
    BLUE,
    DATASOURCE,
    GREEN,
    GREY,
    RED,
    Query,
    graph_panel,
    stat_panel,
    steps,
    table_panel,
    timeline_panel,
)

UID = "ddpprobe-overview"
TAG = "ddpprobe"
NODE = 'job=~"$job",instance=~"$node"'
RANK = f'{NODE},rank=~"$rank"'
# After the reduction every rank is as bad as the worst: these kinds name no culprit.
LOCAL = 'kind!~"grad|param"'
PAGE = f'{NODE},level="page"'
BEFORE = f"{RANK},{LOCAL}"
OWN_WORK = f'{RANK},phase=~"data|forward|optimizer"'
LINES = 64  # ranks above which bands replace a line per rank

Placed = tuple[Any, int]  # a panel and its width in columns of 24


def _m(name: str, selector: str) -> str:
    return f"ddpprobe_{name}{{{selector}}}"


def _few(expr: str) -> str:
    """Draw a line per rank only while that can be read."""
    return f"{expr} and on () (count({_m('rank_info', NODE)}) <= {LINES})"


def _rate(name: str, selector: str) -> str:
    return f"rate({_m(name, selector)}[$__rate_interval])"


def _events(name: str, selector: str, window: str = "$__rate_interval") -> str:
    return f"increase({_m(name, selector)}[{window}])"


def _verdict() -> list[Placed]:
    lost = f"({_m('rank_up', RANK)} == bool 0) * on (job, instance) group_left () (1 - {_m('job_finished', NODE)})"
    good_at_zero = steps((None, GREEN), (1, RED))
    return [
        (
            stat_panel(
                "Ranks lost",
                "Ranks whose process is gone before the end of the run. Above 0: see First failure, then that rank's log.",
                "none",
                Query(f"sum({lost})", "lost"),
                good_at_zero,
            ),
            4,
        ),
        (
            stat_panel(
                "Last sign of life",
                "Age of the oldest heartbeat. Above 30 s with no rank lost: a rank hangs or saves a checkpoint.",
                "s",
                Query(
                    f"max(time() - {_m('rank_last_heartbeat_timestamp_seconds', RANK)})", "oldest"
                ),
                steps((None, GREEN), (30, AMBER), (300, RED)),
            ),
            4,
        ),
        (
            stat_panel(
                "Non-finite elements",
                "NaN and infinite elements before any reduction, about, in the shown time (the exact number is in the verdict). Above 0: run ddpprobe anomalies RUN.",
                "short",
                Query(
                    f"round(sum({_events('nonfinite_elements_total', BEFORE, '$__range')}))",
                    "elements",
                ),
                good_at_zero,
            ),
            4,
        ),
        (
            stat_panel(
                "Anomalies, page",
                "Verdicts of level page in the shown time. Above 0: the dots of the Anomalies panel name step and tensor.",
                "none",
                Query(
                    f"round(sum({_events('anomalies_total', PAGE, '$__range')}))",
                    "anomalies",
                ),
                good_at_zero,
            ),
            4,
        ),
        (
            stat_panel(
                "First failure",
                "When the rank that is the cause ended, and of what; the others are torchrun's doing. Empty is good, or the cause is not decided: ddpprobe anomalies RUN.",
                "dateTimeAsIso",
                Query(
                    f"min by (rank, signal) ({_m('first_failure_timestamp_seconds', NODE)}) * 1000",
                    "rank {{rank}} {{signal}}",
                ),
                steps((None, RED)),
                no_value="none",
                with_name=True,
            ),
            4,
        ),
        (
            stat_panel(
                "Steps",
                "Optimizer steps of the slowest rank since its start. Standing still: compare the phases below.",
                "none",
                Query(f"min({_m('steps_total', RANK)})", "steps"),
                steps((None, BLUE)),
            ),
            4,
        ),
    ]


def _ranks() -> list[Placed]:
    up = _m("rank_up", RANK)
    stale = f"(time() - {_m('rank_last_heartbeat_timestamp_seconds', RANK)} > bool 30)"
    busy = f"on (job, instance) group_left () (1 - {_m('paused', NODE)})"
    return [
        (
            timeline_panel(
                "Ranks",
                "Green: alive; amber: alive without a heartbeat for 30 s; red: gone. The first red one is the cause.",
                Query(f"{up} + {up} * {stale} * {busy}", "rank {{rank}}"),
                {0: ("gone", RED), 1: ("up", GREEN), 2: ("stalled", AMBER)},
            ),
            12,
        ),
        (
            graph_panel(
                "Anomalies",
                "Verdicts by detector and level. A dot (exemplar) names step, fqn, kind and rank. Empty is good.",
                "none",
                [
                    Query(
                        f"round(max by (detector, level) ({_events('anomalies_total', NODE)})) > 0",
                        "{{detector}} {{level}}",
                        exemplars=True,
                    )
                ],
                bars=True,
            ),
            12,
        ),
    ]


def _bands(name: str) -> list[Query]:
    metric = _m(name, RANK)
    return [
        Query(f"min({metric})", "min"),
        # One NaN would take the median of all with it.
        Query(f"quantile(0.5, {metric} == {metric})", "median"),
        Query(f"max({metric})", "max"),
    ]


def _training() -> list[Placed]:
    return [
        (
            graph_panel(
                "Loss",
                "Smallest, median and largest loss over the ranks. A gap is a NaN: look below for who had it first.",
                "short",
                _bands("loss"),
                log=True,
            ),
            9,
        ),
        (
            graph_panel(
                "Gradient norm before the reduction",
                f"L2 norm of each rank's own gradients (up to {LINES} ranks, else select some), and of the reduced one. "
                "The rank that leaves the others is the guilty one.",
                "short",
                [
                    Query(_few(_m("grad_norm", RANK)), "rank {{rank}}"),
                    Query(f"max({_m('global_grad_norm', NODE)})", "reduced, all ranks"),
                ],
                log=True,
            ),
            9,
        ),
        (
            graph_panel(
                "Loss scale",
                "Of the GradScaler, over the ranks. It halves when it skips a step, and should rise again. Falling and "
                "falling: no step is taken. Empty is good: there is no GradScaler.",
                "short",
                [
                    Query(f"min({_m('loss_scale', RANK)})", "lowest"),
                    Query(f"max({_m('loss_scale', RANK)})", "highest"),
                ],
                log=True,
            ),
            6,
        ),
    ]


def _nonfinite() -> list[Placed]:
    return [
        (
            graph_panel(
                "Non-finite elements by kind",
                "NaN and infinite elements by where they were seen. grad and param are after the reduction: all ranks "
                "show them. Flat at 0 is good.",
                "short",
                [
                    Query(
                        f"round(sum by (kind) ({_events('nonfinite_elements_total', RANK)}))",
                        "{{kind}}",
                    )
                ],
                bars=True,
            ),
            14,
        ),
        (
            table_panel(
                "Origin of non-finite elements",
                "Ranks and kinds that had them before the reduction, in the shown time. Empty is good.",
                "short",
                Query(
                    f"topk(20, round(sum by (rank, kind) ({_events('nonfinite_elements_total', BEFORE, '$__range')})) > 0)"
                ),
                ["rank", "kind"],
                "elements",
            ),
            10,
        ),
    ]


def _time() -> list[Placed]:
    phases = _rate("step_phase_seconds_total", RANK)
    own = _rate("step_phase_seconds_total", OWN_WORK)
    stepping = _rate("steps_total", RANK)
    return [
        (
            graph_panel(
                "Time per step by phase",
                "Mean over the ranks. Much data: feed it faster. Backward holds the wait for the slowest rank.",
                "s",
                [
                    Query(
                        f"sum by (phase) ({phases}) / on () group_left () sum({stepping})",
                        "{{phase}}",
                    )
                ],
                stacked=True,
            ),
            8,
        ),
        (
            graph_panel(
                "Own work per step by rank",
                "Data, forward and optimizer only: step time is the same on all ranks. The highest line is the straggler.",
                "s",
                [
                    Query(
                        _few(f"sum by (rank) ({own}) / sum by (rank) ({stepping})"),
                        "rank {{rank}}",
                    )
                ],
            ),
            8,
        ),
        (
            graph_panel(
                "Steps",
                "Steps per second of the slowest rank, and skipped ones. Many skipped: the loss scale does not recover.",
                "ops",
                [
                    Query(f"min({stepping})", "steps"),
                    Query(f"max({_rate('skipped_steps_total', RANK)})", "skipped"),
                ],
            ),
            8,
        ),
    ]


def _sites() -> list[Placed]:
    return [
        (
            table_panel(
                "Largest absolute values now",
                "Sites of the newest sampled step, over all ranks. Near 65504 in float16 an overflow follows.",
                "sci",
                Query(f"topk(15, max by (fqn, kind) ({_m('site_abs_max', NODE)}))"),
                ["fqn", "kind"],
                "abs_max",
            ),
            12,
        ),
        (
            table_panel(
                "Largest RMS now",
                "Root mean square of the finite values. A site far above its neighbours in depth is about to blow up.",
                "sci",
                Query(f"topk(15, max by (fqn, kind) ({_m('site_rms', NODE)}))"),
                ["fqn", "kind"],
                "rms",
            ),
            12,
        ),
    ]


def _host() -> list[Placed]:
    return [
        (
            graph_panel(
                "CPU",
                "Busy share of each node's CPUs. At 1 the data loader starves the ranks.",
                "percentunit",
                [Query(_m("host_cpu_ratio", NODE), "{{instance}}")],
                soft_max=1,
            ),
            8,
        ),
        (
            graph_panel(
                "Memory",
                "What the node can still give, and what its ranks hold. Near 0 the kernel kills a rank.",
                "bytes",
                [
                    Query(_m("host_memory_available_bytes", NODE), "available {{instance}}"),
                    Query(
                        f"sum by (instance) ({_m('rank_resident_memory_bytes', RANK)})",
                        "ranks {{instance}}",
                    ),
                ],
            ),
            8,
        ),
        (
            graph_panel(
                "Disk free",
                "Where the run directory lies. At 0 records are dropped and training goes on.",
                "bytes",
                [Query(_m("host_disk_free_bytes", NODE), "{{instance}}")],
            ),
            8,
        ),
    ]


def _self() -> list[Placed]:
    return [
        (
            graph_panel(
                "Overhead",
                "What ddpprobe adds to a step, by the step's own time, on the worst rank. Too much: give budget=.",
                "percentunit",
                [Query(f"max({_m('overhead_ratio', RANK)})", "largest")],
            ),
            5,
        ),
        (
            graph_panel(
                "Components",
                "1 is well. At 0 a component switched itself off; its log says why.",
                "none",
                [Query(f"min by (component) ({_m('component_up', NODE)})", "{{component}}")],
                soft_max=1,
            ),
            4,
        ),
        (
            graph_panel(
                "Coverage",
                "Sites that delivered data at the last sampled step, on the rank with the fewest, against those expected "
                "there. A drop that stays: something fell silent, ddpprobe anomalies RUN names it.",
                "none",
                [
                    Query(f"max({_m('sites_expected', RANK)})", "expected"),
                    Query(f"min({_m('sites_observed', RANK)})", "observed"),
                ],
            ),
            5,
        ),
        (
            graph_panel(
                "Lag",
                "Age of what is shown, backlogs of journal and upload, and scrape time. Growing: the daemon lacks CPU, or the object store does not answer.",
                "s",
                [
                    Query(
                        f"max(time() - {_m('last_collect_timestamp_seconds', NODE)})", "data age"
                    ),
                    Query(f"max({_m('journal_lag_seconds', NODE)})", "journal"),
                    Query(f"max({_m('upload_lag_seconds', NODE)})", "upload"),
                    Query(f"max(scrape_duration_seconds{{{NODE}}})", "scrape"),
                ],
            ),
            5,
        ),
        (
            graph_panel(
                "Series",
                "Series per target, and those the cap refused. Refused: narrow include=, or read the store.",
                "short",
                [
                    Query(f"max(scrape_samples_scraped{{{NODE}}})", "scraped"),
                    Query(f"max({_events('series_dropped_total', NODE)})", "refused"),
                ],
            ),
            5,
        ),
    ]


ROWS = (
    # title, height, collapsed, panels; ids are 100 * row + place, so they stay when a row grows
    ("", 4, False, _verdict),
    ("Ranks and anomalies", 7, False, _ranks),
    ("Loss and gradients", 8, False, _training),
    ("Non-finite values", 7, False, _nonfinite),
    ("Where the time goes", 7, False, _time),
    ("Sites", 9, False, _sites),
    ("Nodes", 7, True, _host),
    ("ddpprobe itself", 6, False, _self),
)


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .definition(query)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .sort(models.VariableSort.NUMERICAL_ASC)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _annotation(name: str, expr: str, title: str, color: str) -> dashboard.AnnotationQuery:
    target = prometheus.Dataquery().ref_id("A").expr(expr).range().interval("")
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(enable=True)
        .icon_color(color)
        .expr(expr)
        .title_format(title)
        .target(target)
    )


def _frame() -> dashboard.Dashboard:
    """Return the dashboard without panels."""
    job = _variable("job", "Job", "label_values(ddpprobe_job_info, job)")
    node = _variable("node", "Node", 'label_values(ddpprobe_job_info{job=~"$job"}, instance)')
    rank = _variable("rank", "Rank", f"label_values(ddpprobe_rank_info{{{NODE}}}, rank)")
    paged = f"max by (job, detector) ({_events('anomalies_total', PAGE)}) > 0"
    dead = f"min by (job, rank, signal) ({_m('first_failure_timestamp_seconds', NODE)}) unless on (job, rank, signal) min by (job, rank, signal) ({_m('first_failure_timestamp_seconds', NODE)} offset 1m)"
    return (
        dashboard.Dashboard("ddpprobe: overview")
        .uid(UID)
        .description("Health of a distributed PyTorch run, and the first bad tensor.")
        .tags([TAG])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone(common_models.TimeZoneBrowser)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(job)
        .with_variable(node)
        .with_variable(rank)
        .annotation(_annotation("Anomalies", paged, "{{detector}}", RED))
        .annotation(_annotation("First failure", dead, "rank {{rank}} {{signal}}", GREY))
        .link(
            dashboard.DashboardLink("ddpprobe")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(as_dropdown=True)
            .keep_time(keep_time=True)
            .include_vars(include_vars=True)
        )
    )


def build() -> dashboard.Dashboard:
    """Return the whole dashboard, placed on the grid."""
    made = _frame()
    y = 0
    for number, (title, height, collapsed, panels) in enumerate(ROWS):
        row = None
        if title:
            grid = models.GridPos(x=0, y=y, w=24, h=1)
            row = dashboard.Row(title).id(100 * number).collapsed(collapsed).grid_pos(grid)
            y += 1
            if not collapsed:
                made = made.with_row(row)
        x = 0
        for place, (panel, width) in enumerate(panels(), 1):
            placed = panel.id(100 * number + place).grid_pos(
                models.GridPos(x=x, y=y, w=width, h=height)
            )
            x += width
            if row is not None and collapsed:
                row = row.with_panel(placed)
            else:
                made = made.with_panel(placed)
        if row is not None and collapsed:
            made = made.with_row(row)
        y += height
    return made
