"""The Run dashboard: is it well? If not: what, where, since when, and what to type."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from grafana import alerts, queries
from grafana.board import Placed, Row, of_one_run, placed
from grafana.panels import (
    AMBER,
    BLUE,
    COUNTED,
    GREEN,
    RED,
    STEPS_PER_SECOND,
    THRESHOLD,
    Column,
    Query,
    fixed,
    graph_panel,
    stat_panel,
    steps,
    table_panel,
    text_panel,
    timeline_panel,
)
from grafana.queries import (
    BANDS,
    CAUSE,
    CAUSE_WORDS,
    FAILED,
    FAULT,
    HEARTBEAT_SECONDS,
    HUNG,
    LINES,
    LOCAL,
    NO_DATA,
    NODE,
    OWN_SECONDS,
    RANK,
    RANK_STATES,
    SHOWN_STATES,
    STATES_WITH_FAULT,
    at_the_end,
    by_rank,
    causes,
    deaths,
    events,
    in_words,
    lasting_causes,
    metric,
    none_of,
    of_earlier_attempts,
    or_none,
    rank_state,
    rate,
    state,
    waited_for,
    with_fault,
)

UID = "ddpprobe-run"
MOST_WARNINGS = 3  # detectors named by the verdict of a run that only has warnings
GOOD_AT_ZERO = steps((None, GREEN), (1, RED))
VERDICTS = {21: ("warning", AMBER), 22: ("page", RED)}
# The path once: three times a long one, and the last command was not to be seen.
COMMANDS = """```
cd "$directory"
ddpprobe anomalies .
ddpprobe report . -o ~/report.html
ddpprobe top .
```
"""


def _failure() -> str:
    """Return the ranks that were the first to fail; the value is when, in Unix seconds."""
    failure = metric("first_failure_timestamp_seconds", NODE)
    return f"max by (job, run, rank, signal) (max_over_time({failure}[$__range]))"


def _hanging() -> str:
    """Return the ranks that the others wait for, if the job hangs."""
    return f"{waited_for(NODE)} and on () ({at_the_end(state(NODE))} == {HUNG})"


def _verdict() -> Query:
    # Of an end one rank is known to be the cause of, its signal as well.
    ended = deaths(NODE, f"job, run, {CAUSE}")
    signal = f"topk by (job, run, rank) (1, {_failure()})"
    signalled = f"{ended} + on (job, run, rank) group_left (signal) 0 * {signal}"
    # While it hangs that is the verdict, and not a second one.
    caused = (
        f"{causes(NODE, which=FAULT)} or "
        f"(({signalled} or on (rank) {ended}) unless on () ({_hanging()}))"
    )
    return Query(
        f"1000 * topk(1, {in_words(f'({caused})')})",
        CAUSE_WORDS,
        instant=True,
        style=fixed(RED),
    )


def _otherwise() -> list[Query]:
    """Return the verdicts of a run in which no page was found: what is known, from bad to good."""
    now = at_the_end(state(NODE))
    seen = f"max(max_over_time({metric('last_collect_timestamp_seconds', NODE)}[$__range]))"
    stuck = _hanging()
    # The step, if the detector of hangs has told it.
    step = f"topk by (rank) (1, {deaths(NODE, 'rank, step')})"
    in_step = f"(({stuck}) + on (rank) group_left (step) 0 * {step}) or on (rank) ({stuck})"
    in_step = f'label_replace({in_step}, "at", " in step $1", "step", "(.+)")'
    # Another attempt may have followed it.
    rank = "job, run, rank, signal"
    failure = metric("first_failure_timestamp_seconds", NODE)
    before = f"({_failure()} and on ({rank}) {of_earlier_attempts(failure, NODE, rank)})"
    failed = f"({_failure()} unless on ({rank}) {before})"
    unless = f"unless on () max({lasting_causes(NODE)})"
    unknown = f"{seen} and on () ({now} >= {FAILED}) {unless} unless on () {failed} unless on () ({stuck})"
    bad = f'{NODE},level=~"page|warn"'
    warned = f"topk({MOST_WARNINGS}, sum by (detector) ({events('anomalies_total', bad, '$__range')}) > 0)"
    warn = f'{NODE},level="warn"'
    # A detector's warnings count it, and not their ranks. If nothing else was found on any rank but
    # one, it is that one's.
    blamed = f"(sum by (rank) ({events('rank_anomalies_total', warn, '$__range')}) > 0)"
    one = f"({blamed} and on () (count({blamed}) == 1) and on () (count({warned}) == 1))"
    who = f'max by (who) (label_replace({one}, "who", ", rank $1", "rank", "(.+)"))'
    named = f"(0 * {warned} + on () group_left (who) 0 * {who} or on (detector) 0 * {warned})"
    well = f"({seen} {unless} unless on () {failed} unless on () ({now} >= {FAILED}))"
    return [
        Query(
            f"1000 * {in_step}",
            "All wait for rank {{rank}}{{at}} ({{phase}})", instant=True, style=fixed(RED),
        ),
        Query(
            f"1000 * {failed} {unless} unless on () ({stuck})",
            "Rank {{rank}} was the first to fail ({{signal}})", instant=True, style=fixed(RED),
        ),
        Query(
            f"1000 * ({unknown})",
            "It did not end well, and the cause is not known", instant=True, style=fixed(RED),
        ),
        Query(
            f"1000 * (topk(1, {before}) and on () {well})",
            "It goes on; in an earlier attempt rank {{rank}} was the first to fail ({{signal}})",
            instant=True, style=fixed(AMBER),
        ),
        Query(
            f"1000 * ({named} + on () group_left () {well})",
            "warning: {{detector}}{{who}}", instant=True, style=fixed(AMBER),
        ),
        Query(
            f"1000 * ({well} unless on () ({warned}) unless on () {before})",
            "Nothing wrong was found", instant=True, style=fixed(GREEN),
        ),
    ]  # fmt: skip


def _first_screen() -> list[Placed]:
    verdicts = [_verdict(), *_otherwise()]
    return [
        (
            stat_panel(
                "Verdict",
                "The first cause of the newest fault. Red: type the first command on the right, or open the runbook of the detector.",
                "none",
                verdicts,
                no_value=NO_DATA,
                named=True,
            ),
            12,
        ),
        (
            stat_panel(
                "Since",
                "When that was seen first; while nothing is wrong, how fresh this is: if it stands still, the daemon is gone or stuck.",
                "dateTimeAsIsoNoDateIfToday",
                verdicts,
                no_value="-",
            ),
            3,
        ),
        (
            stat_panel(
                "State",
                "The last known state of the job, of several nodes the worst. Anything red: the verdict, else the command on the right.",
                "none",
                [
                    Query(
                        with_fault(at_the_end(state(NODE)), f"max({lasting_causes(NODE)})"), "state"
                    )
                ],
                words=STATES_WITH_FAULT,
                no_value="no data",
            ),
            3,
        ),
        (
            text_panel(
                "What to type",
                "On a machine that sees the run directory: what went wrong and what followed, a page to pass on, a live view.",
                COMMANDS,
            ),
            6,
        ),
    ]


def _progress() -> list[Placed]:
    lost = f"sum({metric('rank_up', RANK)} == bool 0)"
    nonfinite = f"sum({events('nonfinite_elements_total', LOCAL, '$__range')})"
    loss = metric("loss", RANK)
    return [
        (
            stat_panel(
                "Step",
                "Optimizer steps of the slowest rank since its start. Standing still: look at the time line below.",
                "none",
                [Query(at_the_end(f"min({metric('steps_total', RANK)})"), "steps")],
            ),
            4,
        ),
        (
            stat_panel(
                "Step time",
                "Seconds from one step to the next now, of the slowest rank. Rising: the row Where the time goes says in which phase. "
                "Empty when no step is taken.",
                "s",
                [Query(f"1 / (min({rate('steps_total', RANK)}) > 0)", "a step", instant=True)],
                no_value="no step seen",
            ),
            4,
        ),
        (
            stat_panel(
                "Last finite loss",
                "The lowest over the ranks. It stays when the loss becomes NaN: the graph below says since when.",
                "short",
                [Query(at_the_end(f"min({loss} == {loss})"), "loss")],
                no_value="none seen",
            ),
            4,
        ),
        (
            stat_panel(
                "Ranks lost",
                "Ranks whose process was gone before its end, when they were last seen. Above 0: the verdict names the first, its own log says why.",
                "none",
                [Query(at_the_end(lost), "lost")],
                GOOD_AT_ZERO,
            ),
            4,
        ),
        (
            stat_panel(
                "Non-finite elements",
                "NaN and infinite elements before any reduction, about, in the shown time (the verdict has the exact number). Above 0: see Faults below.",
                "short",
                [Query(f"round({nonfinite})", "elements", instant=True)],
                GOOD_AT_ZERO,
            ),
            4,
        ),
        (
            stat_panel(
                "Started again",
                "Attempts that another one followed, since the run began. Above 0: ddpprobe anomalies names the rank that failed.",
                "none",
                [
                    Query(
                        at_the_end(f"max(sum by (instance) ({metric('restarts_total', NODE)}))"),
                        "restarts",
                    )
                ],
                steps((None, BLUE), (1, AMBER)),
            ),
            4,
        ),
    ]


def _time_line() -> list[Placed]:
    ranks = f"count({metric('rank_info', NODE)})"
    few, many = (f"and on () ({ranks} {is_} {LINES})" for is_ in ("<=", ">"))
    up, stuck = metric("rank_up", RANK), metric("rank_stuck", RANK)
    # Who was up the shortest went first.
    gone = f"sum_over_time({up}[$__range] @ end()) and min_over_time({up}[$__range] @ end()) == 0"
    waited = f"-1 * (max_over_time({stuck}[$__range] @ end()) > 0)"
    first = f"bottomk({queries.ROWS}, max by (rank) ({waited}) or max by (rank) ({gone}))"

    def found(level: str, code: int) -> str:
        rose = events("anomalies_total", f'{NODE},level="{level}"')
        return f"{code} * (max by (detector) ({rose}) > bool 0) > 0"

    return [
        (
            timeline_panel(
                "Job, ranks and detectors",
                f"What the job was, which rank had no heartbeat for {HEARTBEAT_SECONDS} s, was waited for or gone "
                f"(of more than {LINES} ranks the first {queries.ROWS} of these two), and which detector found something. What turns red first is the cause.",
                [
                    Query(state(NODE), "job"),
                    Query(f"{rank_state()} {few}", "rank {{rank}}"),
                    Query(f"{rank_state()} and on (rank) {first} {many}", "rank {{rank}}"),
                    Query(f"{found('page', 22)} or {found('warn', 21)}", "{{detector}}"),
                ],
                SHOWN_STATES | RANK_STATES | VERDICTS,
            ),
            24,
        ),
    ]


def _bad(values: str) -> Query:
    """Return how many ranks have no finite value: it stays on the screen when their lines end."""
    count = f"sum(({values} != bool {values}) + (abs({values}) == bool Inf))"
    return Query(count, "ranks with NaN or infinity", style=COUNTED)


def _training() -> list[Placed]:
    loss, norm = metric("loss", RANK), metric("grad_norm", RANK)
    finite = f"({loss} == {loss})"
    reduced = metric("global_grad_norm", NODE)
    recent, past = alerts.EXPLODED_WINDOWS
    explodes = f"{alerts.EXPLODED} * quantile_over_time(0.5, {norm}[{past}] offset {recent})"
    recent, past = alerts.VANISHED_WINDOWS
    vanishes = f"{alerts.VANISHED:g} * quantile_over_time(0.5, {reduced}[{past}] offset {recent})"
    return [
        (
            graph_panel(
                "Loss",
                "Lowest, median and highest finite loss over the ranks. Where a line ends the loss is not finite any more: the red "
                "area (right axis) counts the ranks, and Faults below says who had it first.",
                "short",
                [
                    Query(f"min({finite})", "lowest"),
                    Query(f"quantile(0.5, {finite})", "median"),
                    Query(f"max({finite})", "highest"),
                    _bad(loss),
                ],
                log=True,
            ),
            10,
        ),
        (
            graph_panel(
                "Gradient norm",
                "L2 norm of each rank's own gradients before the reduction, of the reduced ones, and of what clipping leaves of them. The rank that leaves the others is "
                "the guilty one. Dashed: above it, or below the lower one, an alert fires; each is drawn as soon as there is enough "
                f"past to tell ({alerts.EXPLODED_WINDOWS[0]} and {alerts.VANISHED_WINDOWS[0]}). {BANDS}",
                "short",
                [
                    *by_rank(norm),
                    Query(f"max({reduced})", "reduced, all ranks"),
                    Query(f"max({metric('global_grad_norm_used', NODE)})", "after clipping"),
                    Query(
                        f"max(clamp_min({explodes}, {alerts.LEAST_NORM}))",
                        "explodes",
                        style=THRESHOLD,
                    ),
                    Query(f"max({vanishes})", "vanishes", style=THRESHOLD),
                    _bad(norm),
                ],
                log=True,
            ),
            10,
        ),
        (
            graph_panel(
                "Loss scale",
                "Of the GradScaler, over the ranks. It halves when it skips a step, and should rise again. Falling and "
                "falling: no step is taken. Of a run without a GradScaler there is none.",
                "short",
                [
                    Query(f"min({metric('loss_scale', RANK)})", "lowest"),
                    Query(f"max({metric('loss_scale', RANK)})", "highest"),
                ],
                log=True,
                no_value="none seen: without a GradScaler there is none",
            ),
            4,
        ),
    ]


def _faults() -> list[Placed]:
    seen = f"1000 * max(max_over_time({metric('last_collect_timestamp_seconds', NODE)}[$__range]))"
    when = Query(or_none(f"1000 * {causes(NODE)}", seen, "detector"))
    nonfinite = f"round(sum by (kind) ({events('nonfinite_elements_total', RANK)})) > 0"
    columns = [
        Column("seen", when, {"unit": "dateTimeAsIso", "custom.width": 170}),
        *(Column(word) for word in ("detector", "step", "rank", "fqn", "kind", "phase")),
    ]
    return [
        (
            table_panel(
                "Faults, in order of time",
                "The first cause of each episode in the shown time: where it began. ddpprobe anomalies says what followed from it. Warnings are not here, they stand in the time line above. None: up to the time beside it.",
                "none",
                columns,
                "seen",
                ascending=True,
                finest=True,
                no_value=NO_DATA,
            ),
            14,
        ),
        (
            graph_panel(
                "Non-finite elements by kind",
                "NaN and infinite elements by where they were seen. grad and param are after the reduction: all ranks "
                "show them. None is good.",
                "short",
                [Query(nonfinite, "{{kind}}"), none_of(nonfinite)],
                bars=True,
                no_value=NO_DATA,
            ),
            10,
        ),
    ]


def _time() -> list[Placed]:
    phases = rate("step_phase_seconds_total", RANK)
    stepping = rate("steps_total", RANK)
    step_seconds = f"max(sum by (rank) ({phases}) / (sum by (rank) ({stepping}) > 0))"
    working = f"(({OWN_SECONDS}) > 0)"
    others = f"quantile(0.5, {working} unless topk(1, {working}))"
    straggles = f"{others} + {alerts.STRAGGLER_SHARE} * {step_seconds}"
    return [
        (
            graph_panel(
                "Time per step by phase",
                "Mean over the ranks. Much data: feed it faster. Backward holds the wait for the slowest rank.",
                "s",
                [
                    Query(
                        f"sum by (phase) ({phases}) / on () group_left () (sum({stepping}) > 0)",
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
                "Data, forward and optimizer only: step time is the same on all ranks. The highest line is the straggler; "
                f"an alert fires if it stays above the dashed line. {BANDS}",
                "s",
                [*by_rank(OWN_SECONDS), Query(straggles, "straggles", style=THRESHOLD)],
            ),
            8,
        ),
        (
            graph_panel(
                "Steps",
                "Steps per second of the slowest rank, and skipped ones. Many skipped: the loss scale does not recover.",
                STEPS_PER_SECOND,
                [
                    Query(f"min({stepping})", "steps"),
                    Query(f"max({rate('skipped_steps_total', RANK)})", "skipped"),
                ],
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
                [Query(f"max({metric('overhead_ratio', RANK)})", "largest")],
            ),
            5,
        ),
        (
            graph_panel(
                "Components",
                "1 is well. At 0 a component switched itself off; its log says why.",
                "none",
                [Query(f"min by (component) ({metric('component_up', NODE)})", "{{component}}")],
                soft_max=1,
            ),
            4,
        ),
        (
            graph_panel(
                "Coverage",
                "Sites that delivered data at the last sampled step, on the rank with the fewest, against those expected "
                "there. A drop that stays: something fell silent, ddpprobe anomalies names it.",
                "none",
                [
                    Query(f"max({metric('sites_expected', RANK)})", "expected"),
                    Query(f"min({metric('sites_observed', RANK)})", "observed"),
                ],
            ),
            5,
        ),
        (
            graph_panel(
                "Lag",
                "Age of what is shown, backlogs of journal and upload, and scrape time. Growing: the daemon lacks CPU, or the object store does "
                "not answer. Empty lines: a run without a URL has no upload, one that is over no scrape.",
                "s",
                [
                    Query(
                        f"max(time() - {metric('last_collect_timestamp_seconds', NODE)})",
                        "data age",
                    ),
                    Query(f"max({metric('journal_lag_seconds', NODE)})", "journal"),
                    Query(f"max({metric('upload_lag_seconds', NODE)})", "upload"),
                    Query(f"max(scrape_duration_seconds{{{NODE}}})", "scrape"),
                ],
            ),
            5,
        ),
        (
            graph_panel(
                "Series",
                "Series per target, and those the cap refused. Refused: narrow include=, or read the store. Empty lines: a run that is over is not scraped.",
                "short",
                [
                    Query(f"max(scrape_samples_scraped{{{NODE}}})", "scraped"),
                    Query(f"max({events('series_dropped_total', NODE)})", "refused"),
                ],
            ),
            5,
        ),
    ]


ROWS = (
    Row("", 5, False, _first_screen),
    Row("", 3, False, _progress),
    Row("What happened when", 8, False, _time_line),
    Row("Loss and gradients", 8, False, _training),
    Row("Faults", 7, False, _faults),
    Row("Where the time goes", 7, False, _time),
    Row("ddpprobe itself", 6, True, _self),
)


def build() -> dashboard.Dashboard:
    """Return the whole dashboard."""
    text = "One run: is it well? If not: what, where, since when, and what to type."
    return placed(of_one_run(UID, "run", text, by_rank=True), ROWS)
