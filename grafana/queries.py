"""The PromQL that several dashboards share: selectors, states of a job, lines or bands by rank.

A dashboard is of one run: `job` and `run` are single values, so they are matched with `=`, and no
character of a name is taken for a pattern. A target that discovery gave no label `run` has the
empty one, which is the value of the variable when there is none to choose.

Measured traps that shaped the expressions: `sum`, `avg` and `quantile` are NaN if one value is, and
`x == x` drops it; `last_over_time` brings back what ended, so a state is one number over time and
its newest value is asked for.
"""

from __future__ import annotations

from ddpprobe.metrics.table import JOINED_ABOVE
from grafana import alerts
from grafana.panels import AMBER, BLUE, GREEN, GREY, PURPLE, RED, Query

RUN = 'job="$job",run="$run"'
NODE = f'{RUN},instance=~"$node"'
RANK = f'{NODE},rank=~"$rank"'
OWN_WORK = f'{RANK},phase=~"{alerts.OWN_WORK}"'
# After the reduction every rank is as bad as the worst: these kinds name no culprit.
LOCAL = f'{RANK},kind!~"{alerts.REDUCED}"'
PAGE = f'{NODE},level="page"'
LINES = 16  # ranks above which bands replace a line per rank
WORST = 5  # ranks, nodes or runs that are drawn beside the bands
ROWS = 20  # of a table

HUNG = 5
# What a job can be (`ends.judge.STATES`), worse ones higher: of several nodes the worst is shown.
NO_ANSWER = 7
STATES = {
    0: ("ended", BLUE),
    1: ("running", GREEN),
    2: ("stopped", GREY),
    3: ("unknown", AMBER),
    4: ("vanished", RED),
    HUNG: ("hung", RED),
    6: ("crashed", RED),
}
SHOWN_STATES = {
    **STATES,
    2: ("stopped from outside", GREY),
    3: ("over, how is not known", AMBER),
    NO_ANSWER: ("does not answer", PURPLE),
}
# They share a time line with those, so they share the numbers. Worse ones are higher here as well.
UP = 10
RANK_STATES = {
    UP: ("up", GREEN),
    11: ("no heartbeat", AMBER),
    12: ("gone", RED),
    13: ("waited for", RED),
}
HEARTBEAT_SECONDS = alerts.SILENT_SECONDS
FAILED = 3  # from here on it is not well
FAULTY = 10  # more than the state of a run that did not fail, in which a fault was found
STATES_WITH_FAULT = SHOWN_STATES | {
    FAULTY + code: (f"{SHOWN_STATES[code][0]}, with a fault", RED) for code in range(FAILED)
}

CAUSE = "detector, step, rank, fqn, kind, phase"
# Of first causes: the end of the job, and all others.
DEATH, FAULT = 'detector="rank_lost"', 'detector!="rank_lost"'


def metric(name: str, selector: str) -> str:
    """Return an instant selector of one of our metrics; `name` without its prefix."""
    return f"ddpprobe_{name}{{{selector}}}"


def rate(name: str, selector: str) -> str:
    """Return a counter's rate per second."""
    return f"rate({metric(name, selector)}[$__rate_interval])"


def events(name: str, selector: str, window: str = "$__rate_interval") -> str:
    """Return by how much a counter rose, with what it held when it was seen first.

    `increase()` does not see that: what was counted before the first scrape.
    """
    counter = metric(name, selector)
    rose = f"increase({counter}[{window}])"
    known = f"max_over_time({counter}[{alerts.KNOWN_WINDOW}] offset {window})"
    new = f"(min_over_time({counter}[{window}]) unless {known})"
    return f"({rose} + {new} or {rose} or {new})"


def state(selector: str, by: str = "") -> str:
    """Return the state of a job over time, as a key of `SHOWN_STATES`.

    A target counts as not answering if the job ran when it answered last.
    """
    told = " or ".join(
        f'{code} * ddpprobe_job_state{{{selector},state="{word}"}}'
        for code, (word, _) in STATES.items()
    )
    running = f"last_over_time(job_run_instance:ddpprobe_job_running:max{{{selector}}}[{alerts.SEEN_WINDOW}])"
    silent = (
        f"{NO_ANSWER} + up{{{selector}}} == {NO_ANSWER} and on (job, run, instance) {running} == 1"
    )
    return f"max{f' by ({by})' if by else ''} ({told} or {silent})"


def with_fault(states: str, found: str, by: str = "") -> str:
    """Return the states of runs, as keys of `STATES_WITH_FAULT`.

    A run with a NaN is no good one, though it goes on.

    Args:
        states: as of `state`, of runs.
        found: the first causes that hold, by the same labels.
        by: these labels.
    """
    faulty = f"({states} < {FAILED}) + on ({by}) ({FAULTY} + 0 * {found})"
    return f"{faulty} or on ({by}) {states}"


def at_the_end(expr: str) -> str:
    """Return the newest value of an expression within the shown time, even if nothing came since."""
    return f"last_over_time(({expr})[$__range:$__interval])"


def none_of(found: str) -> Query:
    """Return a line at 0 that says so where nothing of something was found in the shown time.

    Only where a daemon was asked: else nothing is known, and the panel is empty.
    """
    seen = f"max({metric('last_collect_timestamp_seconds', NODE)})"
    ever = f"max_over_time(({found})[$__range:$__interval] @ end())"
    return Query(f"0 * {seen} unless on () {ever}", "none")


def or_none(found: str, known: str, label: str) -> str:
    """Return rows of a table, or one that says "none" in a label: it is known that there is none.

    Args:
        found: the rows.
        known: what there is a value of if it is known: the value of that row.
        label: where it is said.
    """
    return f'({found}) or on () label_replace({known}, "{label}", "none", "", "")'


NO_DATA = "no data: is the run scraped?"


def causes(selector: str, by: str = CAUSE, which: str = "") -> str:
    """Return the first causes told within the shown time; the value is when, in Unix seconds.

    Args:
        selector: of targets.
        by: labels that are kept.
        which: of the causes alone: when they were seen has no label of theirs.
    """
    info = metric("first_cause_info", f"{selector},{which}" if which else selector)
    when = metric("first_cause_timestamp_seconds", selector)
    timed = f"{info} * on (job, run, instance) group_left () {when}"
    return f"max by ({by}) (max_over_time(({timed})[$__range:$__interval]))"


def of_earlier_attempts(series: str, selector: str, by: str) -> str:
    """Return those of some series that are of an earlier attempt than the newest one of their run.

    Args:
        series: what a daemon says of its attempt; finite.
        selector: of targets.
        by: labels that are kept, job and run among them.
    """
    attempt = metric("attempt", selector)
    own = f"(0 * {series} + on (job, run, instance) group_left () {attempt})"
    own = f"max by ({by}) (max_over_time({own}[$__range:$__interval]))"
    return f"({own} < on (job, run) group_left () {at_the_end(f'max by (job, run) ({attempt})')})"


def deaths(selector: str, by: str = CAUSE) -> str:
    """Return of the first causes as of `causes` ends of the job: no hang that was over.

    Nor what another attempt has followed: the run goes on.
    """
    lost = metric("first_cause_info", f"{selector},{DEATH}")
    held = f"max by (job, run, instance) ({lost} or 0 * {metric('job_info', selector)})"
    each = f"job, run, instance, {CAUSE}"
    ended = f"{causes(selector, each, DEATH)} and on (job, run, instance) {at_the_end(held)} == 1"
    return f"max by ({by}) ({ended} unless on ({each}) {of_earlier_attempts(lost, selector, each)})"


def lasting_causes(selector: str, by: str = CAUSE) -> str:
    """Return of the first causes as of `causes` those that hold: of ends of the job `deaths`."""
    found = causes(selector, by, FAULT)
    return f"({found} or {deaths(selector, by)})"


def beat_age(selector: str) -> str:
    """Return seconds since each rank's last sign of life, as its daemon saw it when it was scraped.

    Against the time of the query it would grow from one scrape to the next.
    """
    beat = f"ddpprobe_rank_last_heartbeat_timestamp_seconds{{{selector}}}"
    seen = metric("last_collect_timestamp_seconds", NODE)
    return f"-1 * ({beat} - on (job, run, instance) group_left () {seen})"


def rank_state() -> str:
    """Return what each rank (label `rank`) is, as a key of `RANK_STATES`."""
    up = metric("rank_up", RANK)
    stale = f"({beat_age(RANK)} > bool {HEARTBEAT_SECONDS})"
    busy = f"on (job, run, instance) group_left () (1 - {metric('paused', NODE)})"
    seen = f"12 - 2 * {up} + {up} * {stale} * {busy}"
    return f"max by (rank) (13 * {metric('rank_stuck', RANK)} or {seen})"


def waited_for(selector: str) -> str:
    """Return the ranks that the others wait for, and in which phase; the value as of `causes`."""
    beat = f"ddpprobe_rank_last_heartbeat_timestamp_seconds{{{selector}}}"
    timed = (
        f"ddpprobe_rank_stuck{{{selector}}} * on (job, run, instance, rank) group_left () {beat}"
    )
    return f"bottomk({WORST}, max by (rank, phase) ({at_the_end(timed)}))"


def in_words(cause: str) -> str:
    """Return causes with the labels of `CAUSE_WORDS`; what is not known is not in them."""
    for label, text, source, known in (
        ("who", ", rank $1", "rank", "(.+)"),
        ("where", ", $1", "fqn", "(.+)"),
        ("what", " ($1)", "kind", "(.+)"),
        ("when", ", $1", "phase", "(forward|backward)"),
        ("how", " ($1)", "signal", "(.+)"),
    ):
        cause = f'label_replace({cause}, "{label}", "{text}", "{source}", "{known}")'
    return cause


CAUSE_WORDS = "{{detector}} in step {{step}}{{who}}{{how}}{{where}}{{what}}{{when}}"


def by_rank(expr: str, of: str = "rank") -> list[Query]:
    """Return lines: one per rank while they can be read, else bands and the worst ones.

    Args:
        expr: a value for each rank (label `rank`); larger is worse.
        of: what a line is of, before the rank in the legend.
    """
    ranks = f"count({metric('rank_info', NODE)})"
    finite = f"({expr}) == ({expr})"
    many = f"and on () ({ranks} > {LINES})"
    # Which are the worst is decided once, at the end of the shown time: else every point could
    # bring other ones.
    worst = f"topk({WORST}, max by (rank) (max_over_time(({expr})[$__range:$__interval] @ end())))"
    return [
        Query(f"({expr}) and on () ({ranks} <= {LINES})", f"{of} {{{{rank}}}}"),
        Query(f"min({finite}) {many}", "lowest"),
        # One NaN would take the median of all with it.
        Query(f"quantile(0.5, {finite}) {many}", "median"),
        Query(f"max({finite}) {many}", "highest"),
        Query(f"({expr}) and on (rank) {worst} {many}", f"{of} {{{{rank}}}}"),
    ]


BANDS = f"Above {LINES} ranks: lowest, median, highest, and the {WORST} worst."
BY_NODE = f"{BANDS} Above {JOINED_ABOVE:,} ranks: by node, its ranks in one."


def seconds_a_step(selector: str) -> str:
    """Return each rank's seconds a step in the phases that a selector picks."""
    spent = rate("step_phase_seconds_total", selector)
    # Without a step there is no number, and not 0 / 0: the last one is what tables show then.
    return f"sum by (rank) ({spent}) / (sum by (rank) ({rate('steps_total', RANK)}) > 0)"


OWN_SECONDS = seconds_a_step(OWN_WORK)


def is_cut(text: str, of: str) -> str:
    """Return a description of something that shows only a part of what there is."""
    return f"{text} The {ROWS} {of} are shown."
