"""The alert rules, as data. Selectors and thresholds are here and nowhere else.

An alert is one per run and episode, never one per rank, so every rule ends in `by (job, run)`. The
label `run` comes from discovery; without it the rules hold for one run per job.

Measured traps that shaped the expressions: `unless` binds tighter than `or`, so every `or` is in
parentheses; a NaN is found by `x != x`, never by a comparison; `increase()` does not see what a
counter held at its first scrape; a target that leaves takes its gauges along within a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpprobe.records.step import BACKWARD_KINDS, REDUCED_KINDS

RUNBOOK_BASE = "docs/runbooks"  # `ddpprobe up --runbook-base` replaces it,
GRAFANA_URL = "http://localhost:3000"  # and `--grafana-url` this
DASHBOARD = "ddpprobe-run"

# What a target said last counts so long after it has gone. Alertmanager waits 30 s before it tells.
LAST_WORDS = "5m"
EPISODE = "1h"  # how long a first cause stays an alert, in a run that goes on
# What grew within these counts as new. Five minutes hold four scrapes that are a minute apart.
PAGE_WINDOW = "5m"
WARN_WINDOW = "10m"
KNOWN_WINDOW = "1h"  # a counter that was not there before that is new, whatever it holds
# A restart within this is no lost run; the head says within it what a NaN is, and a page what a
# warning was.
END_WAIT = "30s"
HEAD_WAIT = "1m"
REDUCED = "|".join(REDUCED_KINDS)
GRADIENTS = "|".join(BACKWARD_KINDS)
LOST = "crashed|vanished"  # states of a job that is over, and not well
# A spike of the gradient norm against its own past, and its disappearance.
EXPLODED = 10
EXPLODED_WINDOWS = ("5m", "15m")
LEAST_NORM = 1  # a smaller one explodes nothing
VANISHED = 1e-3
VANISHED_WINDOWS = ("10m", "1h")
VANISHED_WAIT = "5m"
# A warm-up that skips a few steps is over within the window; it would have to last longer.
OVERFLOW_SHARE = 0.1
OVERFLOW_WINDOW = "10m"
OVERFLOW_WAIT = "15m"
# Longer than a checkpoint outside `pause()`; and when no daemon sees that nobody moves.
STUCK_WAIT = "3m"
NO_STEP_WINDOW = "15m"
# The rank that the others wait for: this share of a step, for so long.
STRAGGLER_SHARE = 0.2
STRAGGLER_WAIT = "10m"
OWN_WORK = "data|forward|optimizer"  # phases in which a rank waits for nobody
# Coverage is judged best against best: what comes and goes (LayerDrop, experts) is in both windows.
COVERAGE_WINDOWS = ("10m", "1h")
COVERAGE_KEPT = 0.9
# Records may be on their way from a GPU: so many are no loss yet, nor is what comes within a while.
ON_THEIR_WAY = 4
LOST_WINDOWS = ("2m", "1h")
# What a disk answers, and what is not tried for a second after that.
DISK = "E[A-Z0-9]+|io|back_off|journal"
MISSING_SECONDS = 60  # since another node's daemon pushed last, which it does every second or so
MISSING_WAIT = "30s"
SILENT_SECONDS = 30  # without a heartbeat, of a rank whose process nobody has seen
# A target that was running when it was last seen, within this.
SEEN_WINDOW = "1h"
DOWN_WAIT = "2m"
STALE_SECONDS = 120
# A twentieth of a step, and ten milliseconds of each one: steps of a few milliseconds are not worth
# a word, as a hook shows in them whatever is set, and from 0.2 s on the ratio alone decides.
OVERHEAD = 0.05
OVERHEAD_SECONDS = 0.01
OVERHEAD_WINDOW = "5m"
OVERHEAD_WAIT = "10m"
# Of a machine's memory, or of what a container may have: what page caches hold counts as available.
MEMORY_LEFT = 0.05
MEMORY_WAIT = "2m"
MOST_NAMED = 8  # ranks or nodes in a text


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded series, named level:metric:operations."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule; `name` without the prefix, `wait` as Prometheus writes durations.

    `severity`: critical if a person must act now, warning if somebody must look, else info.
    """

    name: str
    severity: str
    expr: str
    summary: str
    description: str
    wait: str = ""


@dataclass(frozen=True, slots=True)
class Echo:
    """While one of `sources` fires for a run, `targets` are held back, if they match `only`."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    only: str = ""


_IS_LOST = "job_run_instance:ddpprobe_job_lost:max"
_IS_HUNG = "job_run_instance:ddpprobe_job_hung:max"
_IS_CAUSE = "job_run_instance:ddpprobe_end_is_cause:max"
_STANDS = "job_run_instance:ddpprobe_job_stuck:max"
_STOOD_LONG = "job_run_instance:ddpprobe_job_stuck:min3m"
_GOES_ON = (
    '(ddpprobe_job_state{state="running"} and on (job, run, instance) (ddpprobe_attempt'
    f" > on (job, run) group_left () min by (job, run) (min_over_time(ddpprobe_attempt[{LAST_WORDS}]))))"
)


def _told(selector: str, unless: str = "unless on (job, run, instance) ddpprobe_job_info") -> str:
    """Return what is said now, or was said at last, unless something takes its place.

    By default whatever its target says: what that does not say any more is over.
    """
    return f"({selector} or (max_over_time({selector}[{LAST_WORDS}]) {unless}))"


def _at_last(selector: str, stood: str = "") -> str:
    """Return what is said now, or was said by a target that left when its job was lost.

    A target that has gone said more than one thing within the last minutes: what counts is how its
    job stood when it left: lost, or as `stood` says. Nor does it count where a later attempt trains
    elsewhere.
    """
    return _told(
        selector,
        f"and on (job, run, instance) {stood or f'last_over_time({_IS_LOST}[{LAST_WORDS}]) == 1'}"
        f" unless on (job, run, instance) ddpprobe_job_info unless on (job, run) {_GOES_ON}",
    )


def _recorded_state(states: str) -> str:
    """Return 1 while a target says that its job is in one of these states, 0 in another."""
    return f"""max by (job, run, instance) (
  ddpprobe_job_state{{state=~"{states}"}} or 0 * ddpprobe_job_state{{state!~"{states}"}}
)"""


def _grown(selector: str, window: str) -> str:
    """Return which counters grew within a window, or are new and not 0.

    What a target that has gone said counts no longer than its other last words.
    """
    lately = f" and last_over_time({selector}[{LAST_WORDS}])" if window != LAST_WORDS else ""
    return (
        f"(increase({selector}[{window}]) > 0{lately}"
        f" or ({selector} > 0 unless max_over_time({selector}[{KNOWN_WINDOW}] offset {window})))"
    )


def _ask(expr: str) -> str:
    """Return, for a template, the answer to a query; `%[1]s` is the selector of the alert's run."""
    asked = expr.replace("%s", "job=%[1]q,run=%[2]q")
    return f"printf `{asked}` $labels.job $labels.run | query"


def _list(expr: str, label: str, otherwise: str, before: str = "") -> str:
    """Return a template that lists a label of what a query finds, if it finds something."""
    item = f'{{{{ if $i }}}}, {{{{ end }}}}{{{{ $x | label "{label}" }}}}'
    body = f'{{{{ range $i, $x := . | sortByLabel "{label}" }}}}{item}{{{{ end }}}}'
    return f"{{{{ with {_ask(expr)} }}}}{before}{body}{{{{ else }}}}{otherwise}{{{{ end }}}}"


RUN = "{{ with $labels.run }}{{ . }}{{ else }}{{ $labels.job }}{{ end }}"
_INFO = _ask(f"last_over_time(ddpprobe_job_info{{%s}}[{EPISODE}])")
DIRECTORY = (
    f'{{{{ with {_INFO} }}}}{{{{ . | first | label "directory" }}}}{{{{ else }}}}RUN{{{{ end }}}}'
)
ANOMALIES = f"ddpprobe anomalies {DIRECTORY}"
INFO = f"ddpprobe info {DIRECTORY}"
TOP = f"ddpprobe top {DIRECTORY}"
_RANK = "{{ with $labels.rank }}rank {{ . }}{{ else }}no single rank{{ end }}"
# Every other detector that names none has looked at all of them.
_EACH = _ask(f"max(last_over_time(ddpprobe_sample_interval_steps{{%s}}[{EPISODE}])) == 1")
_NO_MODULE = (
    "{{ if eq $labels.detector `nonfinite` }}module not known ("
    f"{{{{ with {_EACH} }}}}every step is sampled, and no module showed it before the loss did"
    "{{ else }}the step was not sampled, or only the loss shows it; every=1, DDPPROBE_EVERY=1, "
    "from a checkpoint before that step would name it{{ end }})"
    "{{ else }}no single module{{ end }}"
)
_NONFINITE = "ddpprobe_nonfinite_elements_total"
_OWN = "job_run_rank:ddpprobe_own_work_seconds:mean5m"
_DATA = "job_run_rank:ddpprobe_data_seconds:mean5m"
_BEHIND = "job_run_rank:ddpprobe_behind_seconds:max5m"
_STEP = "job_run_rank:ddpprobe_step_seconds:mean5m"
_RUNNING = "job_run_instance:ddpprobe_job_running:max"
_CAUSE = "job, run, detector, step, rank, fqn, kind, phase"
_HUNG = f"(last_over_time({_IS_HUNG}[{LAST_WORDS}]) == 1)"
_ENDED = _ask(f"max(last_over_time(ddpprobe_rank_up{{%s}}[{LAST_WORDS}])) == 0")
_STUCK_RANKS = _told("ddpprobe_rank_stuck{%s}", "unless on () ddpprobe_rank_stuck{%s}")
# A job that hangs, and one that did when it ended, if that was told. One that ended before has a
# first failure as others have.
_STUCK = f"""(
  {_STANDS} == 1
  or on (job, run, instance)
  ({_HUNG} and on (job, run, instance) max_over_time({_STOOD_LONG}[{EPISODE}]) == 1)
)"""


def _first_failure(signals: str = "") -> str:
    """Return when which rank failed first: now, or at last if its job was lost, or hung."""
    stood = f"(last_over_time({_IS_LOST}[{LAST_WORDS}]) == 1 or on (job, run, instance) {_HUNG})"
    return _at_last(f"ddpprobe_first_failure_timestamp_seconds{signals}", stood)


_FIRST_FAILURE = _first_failure()
# What a NaN is not the reason of: a script or a library that meets one raises, exits or aborts.
_KILLED = _first_failure('{signal=~"SIG.+",signal!="SIGABRT"}')
_NOT_RUNNING = _told('ddpprobe_job_state{state!~"running|hung"}')
# Only what was running when it was last seen: neither an unused port nor a run that ended.
_UNANSWERED = f"up == 0 and on (job, run, instance) last_over_time({_RUNNING}[{SEEN_WINDOW}]) == 1"
_WITHOUT_ANSWER = (
    f"up{{%s}} == 0 and on (instance) last_over_time({_RUNNING}{{%s}}[{SEEN_WINDOW}]) == 1"
)
_LAST_ANSWER = (
    f"min(last_over_time(ddpprobe_last_collect_timestamp_seconds{{%s}}[{SEEN_WINDOW}])"
    f" and on (instance) {_WITHOUT_ANSWER})"
)
_HUNG_ITSELF = "or (eq $labels.signal `SIGSTOP`) (eq $labels.signal `hang`)"
_ENDED_EARLY = "eq $labels.signal `exit:0`"
_UNASKED = 'ddpprobe_restarts_total{state!~"stopped|ended"}'
_UNASKED_BEFORE = (
    f"max by (job, run, state) (max_over_time({_UNASKED}[{KNOWN_WINDOW}] offset {WARN_WINDOW}))"
)
_LATE_NODES = f"ddpprobe_node_last_block_timestamp_seconds{{%s}} < time() - {MISSING_SECONDS}"


def _ended_ranks(otherwise: str) -> str:
    """Return a template that lists the ranks that ended badly, each with what it died of."""
    asked = _ask(
        f"bottomk({MOST_NAMED}, last_over_time(ddpprobe_rank_end_info{{%s}}[{LAST_WORDS}]))"
    )
    item = '{{ if $i }}, {{ end }}rank {{ $x | label "rank" }} {{ $x | label "signal" }}'
    body = f'{{{{ range $i, $x := . | sortByLabel "rank" }}}}{item}{{{{ end }}}}'
    return f"{{{{ with {asked} }}}}{body}{{{{ else }}}}{otherwise}{{{{ end }}}}"


def _mean_seconds(phases: str) -> str:
    """Return a rank's seconds a step, in phases that match."""
    spent = f'ddpprobe_step_phase_seconds_total{{phase=~"{phases}"}}'
    return f"""sum by (job, run, rank) (rate({spent}[5m]))
/ sum by (job, run, rank) (rate(ddpprobe_steps_total[5m]))"""


def _over_the_others(of: str) -> str:
    """Return by how much each rank exceeds the median of all ranks but the highest of its run.

    For the highest, which is what counts, that is the median of the others: of two ranks the other
    one, where the median of both would halve what lies between them.
    """
    others = f"{of} unless topk by (job, run) (1, {of})"
    return f"{of} - on (job, run) group_left () quantile by (job, run) (0.5, {others})"


RECORDINGS = (
    Recording(_OWN, _mean_seconds(OWN_WORK)),
    Recording(_DATA, _mean_seconds("data")),
    # Under FSDP ranks wait in the forward: then only how late a rank comes to it sets it apart.
    Recording(
        _BEHIND,
        f"""max by (job, run, rank) (
  ({_over_the_others(_OWN)})
  or label_replace({_over_the_others(_DATA)}, "of", "data", "", "")
)""",
    ),
    Recording(_STEP, _mean_seconds(".+")),
    # 1 while a target says that its job runs, 0 when it says that it does not.
    Recording(_RUNNING, _recorded_state("running")),
    # So what a target said last is known when it has gone.
    Recording(_IS_LOST, _recorded_state(f"{LOST}|unknown")),
    Recording(_IS_HUNG, _recorded_state("hung")),
    # While it hangs, which is over when all its ranks have ended; and that this was told.
    Recording(
        _STANDS,
        """max by (job, run, instance) (
  (ddpprobe_job_state{state="hung"} unless on (job, run) max by (job, run) (ddpprobe_rank_up) == 0)
  or 0 * ddpprobe_job_state
)""",
    ),
    Recording(
        _STOOD_LONG,
        f"min_over_time({_STANDS}[{STUCK_WAIT}]) == 1 and {_STANDS} offset {STUCK_WAIT} == 1",
    ),
    # And whether the end was a cause then, or a hang that the head had taken back.
    Recording(
        _IS_CAUSE,
        """max by (job, run, instance) (
  ddpprobe_first_cause_info{detector="rank_lost"} or 0 * ddpprobe_job_info
)""",
    ),
)

ALERTS = (
    Alert(
        "FirstCause",
        "critical",
        # The end of a job has rules of its own. A cause is old after a while, but stays in the text
        # of `anomalies`; and it does not come back with a target that was lost for some minutes,
        # but an attempt that meets the same batch again has a cause of its own. The
        # next attempt knows nothing of it, and may begin before Alertmanager has told it.
        f"""max by ({_CAUSE}) {_told('ddpprobe_first_cause_info{detector!="rank_lost"}', "unless on (job, run) ddpprobe_first_cause_info")}
unless on ({_CAUSE})
(
  max by ({_CAUSE}) (max_over_time(ddpprobe_first_cause_info[{EPISODE}] offset {EPISODE}))
  unless on (job, run)
  max by (job, run) (max_over_time(ddpprobe_attempt[{LAST_WORDS}]))
  > max by (job, run) (max_over_time(ddpprobe_attempt[{EPISODE}] offset {EPISODE}))
)""",
        f"{RUN}: {{{{ $labels.detector }}}} in step {{{{ $labels.step }}}}, {_RANK}"
        "{{ with $labels.fqn }}, {{ . }}{{ end }}",
        "First cause: {{ $labels.detector }} in step {{ $labels.step }}"
        "{{ with $labels.phase }}, {{ . }}{{ end }}: "
        f"{_RANK}, {{{{ with $labels.fqn }}}}module {{{{ . }}}}{{{{ else }}}}{_NO_MODULE}{{{{ end }}}}"
        "{{ with $labels.kind }} ({{ . }}){{ end }}. "
        f"{{{{ with {_ask(f'max(last_over_time(ddpprobe_first_cause_timestamp_seconds{{%s}}[{LAST_WORDS}]))')} }}}}"
        "Seen at {{ . | first | value | humanizeTimestamp }}. {{ end }}"
        f"What followed from it, and the numbers: {ANOMALIES}",
    ),
    Alert(
        "RunLost",
        "critical",
        # The node that knows which rank failed first says so; of several the earliest by its clock.
        # No word while a launcher lives that may start the ranks again, nor where the head says that the end followed from a first cause, which is told, unless
        # a rank was killed; nor, where no rank is known, if a node does not answer: that is what
        # happened, and is told.
        f"""(
  (
    max by (job, run, rank, signal) {_FIRST_FAILURE}
    == on (job, run) group_left ()
    min by (job, run) {_FIRST_FAILURE}
  )
  or on (job, run)
  (
    (
      max by (job, run) {_at_last(f'ddpprobe_job_state{{state=~"{LOST}"}}')}
      or on (job, run)
      max by (job, run) (
        last_over_time({_IS_CAUSE}[{LAST_WORDS}]) == 1
        and on (job, run, instance) {_at_last('ddpprobe_job_state{state="unknown"}')}
      )
    )
    unless on (job, run) ({_UNANSWERED})
  )
)
unless on (job, run) {_STUCK}
unless on (job, run) ddpprobe_restart_awaited == 1
unless on (job, run) (
  {_told('ddpprobe_first_cause_info{detector!="rank_lost"}')}
  and on (job, run, instance) {_NOT_RUNNING}
  unless on (job, run) {_KILLED}
)""",
        f"{RUN} is lost: {{{{ if $labels.rank }}}}rank {{{{ $labels.rank }}}} "
        f"{{{{ if {_HUNG_ITSELF} }}}}hung{{{{ else if {_ENDED_EARLY} }}}}ended before the others"
        "{{ else }}was the first to fail{{ end }}"
        "{{ if ne $labels.signal `hang` }} ({{ $labels.signal }}){{ end }}"
        "{{ else }}which rank was first is not decided ("
        + _ended_ranks("how they ended is not known")
        + "){{ end }}",
        f"{{{{ if {_HUNG_ITSELF} }}}}Rank {{{{ $labels.rank }}}} "
        "{{ if eq $labels.signal `hang` }}did not move on{{ else }}was suspended (SIGSTOP){{ end }}"
        ", and the others waited for it until the ranks ended: "
        + _ended_ranks("not known")
        + "."
        f"{{{{ else if {_ENDED_EARLY} }}}}Rank {{{{ $labels.rank }}}} ended as if all was well at "
        "{{ $value | humanizeTimestamp }}, and the others lost it, perhaps because it had fewer "
        "batches (DistributedSampler, Join)."
        "{{ else if $labels.rank }}Rank {{ $labels.rank }} ended by {{ $labels.signal }} at "
        "{{ $value | humanizeTimestamp }}; the launcher ends all others, so this is the one to look "
        "at: its own log."
        "{{ else }}How they ended: "
        + _ended_ranks("not known")
        + ".{{ end }} "
        f"How it ended, in which step, and what is known of the others: {ANOMALIES}",
        wait=END_WAIT,
    ),
    Alert(
        "Stuck",
        "critical",
        # The second half is for a run whose daemons see too little of it.
        f"""max by (job, run) {_STUCK}
or on (job, run)
(
  sum by (job, run) (increase(ddpprobe_steps_total[{NO_STEP_WINDOW}])) == 0
  and on (job, run) max by (job, run) (ddpprobe_steps_total offset {NO_STEP_WINDOW})
  and on (job, run) max by (job, run) (ddpprobe_steps_total) > 0
  and on (job, run) max by (job, run) (ddpprobe_rank_up) == 1
  unless on (job, run) max by (job, run) (ddpprobe_paused) == 1
  unless on (job, run) ddpprobe_job_state{{state!="running"}}
)""",
        f"{RUN} {{{{ with {_ENDED} }}}}hung, and has ended{{{{ else }}}}hangs{{{{ end }}}}: "
        + _list(f"bottomk({MOST_NAMED}, {_STUCK_RANKS})", "rank", "which rank the others wait for is not known", "look at rank "),
        f"{{{{ with {_ENDED} }}}}No rank moved any more until the ranks ended: "
        + _ended_ranks("how is not known")
        + ". "
        f"{{{{ range {_ask(f'bottomk({MOST_NAMED}, {_STUCK_RANKS})')} | sortByLabel `rank` }}}}"
        'Rank {{ . | label "rank" }} was in {{ . | label "phase" }}. {{ end }}'
        "{{ else }}No rank moves any more"
        f"{{{{ with {_ask('max(last_over_time(ddpprobe_rank_last_heartbeat_timestamp_seconds{%s}[1h]))')} }}}}"
        ", since {{ . | first | value | humanizeTimestamp }}{{ end }}. "
        f"{{{{ range {_ask(f'bottomk({MOST_NAMED}, ddpprobe_rank_stuck{{%s}})')} | sortByLabel `rank` }}}}"
        'Rank {{ . | label "rank" }} is in {{ . | label "phase" }}. {{ end }}'
        f"{{{{ with {_ask('count(ddpprobe_rank_up{%s} == 1 unless on (rank) ddpprobe_rank_stuck{%s})')} }}}}"
        "Waiting: {{ . | first | value }}. {{ end }}Look at its stack before it is killed"
        f"{{{{ range {_ask(f'bottomk({MOST_NAMED}, ddpprobe_rank_info{{%s}} and on (rank) ddpprobe_rank_stuck{{%s}})')} | sortByLabel `rank` }}}}"
        ' (at {{ . | label "instance" }}: py-spy dump --pid {{ . | label "pid" }}){{ end }}. {{ end }}'
        f"What is known: {ANOMALIES}",
        wait=STUCK_WAIT,
    ),
    Alert(
        "NonFinite",
        "critical",
        # For a head that is gone or fails: one that judges knows masks and overflows on purpose.
        f"""(
  max by (job, run) {_grown(f'{_NONFINITE}{{kind!~"{REDUCED}|{GRADIENTS}"}}', PAGE_WINDOW)}
  or on (job, run)
  (
    max by (job, run) {_grown(f'{_NONFINITE}{{kind=~"{GRADIENTS}"}}', PAGE_WINDOW)}
    unless on (job, run) {_grown("ddpprobe_skipped_steps_total", PAGE_WINDOW)}
  )
  or on (job, run)
  max by (job, run) (ddpprobe_loss != ddpprobe_loss or abs(ddpprobe_loss) == Inf)
)
unless on (job, run) (
  max_over_time(ddpprobe_anomalies_total{{detector="nonfinite"}}[{LAST_WORDS}])
  unless on (job, run, instance)
  {_grown('ddpprobe_records_dropped_total{reason="set_aside"}', PAGE_WINDOW)}
)""",
        f"{RUN} has NaN or infinity",
        "Ranks with non-finite values before any reduction: "
        + _list(
            f'bottomk({MOST_NAMED}, sum by (rank) (ddpprobe_nonfinite_elements_total{{%s,kind!~"{REDUCED}"}}) > 0)',
            "rank", "none, only the loss is",
        )
        + ". Within a step every rank has them, and the head node has not said where they began: "
        f"{ANOMALIES}",
        wait=HEAD_WAIT,
    ),
    Alert(
        "RankDead",
        "critical",
        # A rank that is known to live may be silent for the two minutes of a checkpoint. Once it is
        # judged how the job ended, other rules tell what of that is worth a page.
        f"""max by (job, run) (
  (
    (
      time() - ddpprobe_rank_last_heartbeat_timestamp_seconds > {SILENT_SECONDS}
      unless on (job, run, instance, rank) ddpprobe_rank_up == 1
    )
    or on (job, run, instance, rank)
    ddpprobe_rank_up == 0
  )
  unless on (job, run, instance) ddpprobe_job_state{{state!="running"}}
)
unless on (job, run) ddpprobe_first_failure_timestamp_seconds""",
        f"{RUN}: a rank is gone, and the run has not ended",
        "Ranks without a sign of life: "
        + _list(
            f"bottomk({MOST_NAMED}, ddpprobe_rank_up{{%s}} == 0 or on (instance, rank)"
            f" (ddpprobe_rank_last_heartbeat_timestamp_seconds{{%s}} < time() - {SILENT_SECONDS}"
            " unless on (instance, rank) ddpprobe_rank_up{%s} == 1))",
            "rank", "see the panel Ranks",
        )
        + f". The others will hang in their next collective. {INFO}",
        wait=END_WAIT,
    ),
    Alert(
        "NodeMissing",
        "critical",
        # Of a job that is over other rules tell; a node that ended has said so to the head.
        f"""max by (job, run) (
  time() - ddpprobe_node_last_block_timestamp_seconds > {MISSING_SECONDS}
  unless on (job, run, instance) ddpprobe_job_state{{state!~"running|hung"}}
)""",
        f"{RUN}: the head node has lost "
        + _list(f"bottomk({MOST_NAMED}, {_LATE_NODES})", "node", "a node"),
        f"{{{{ range {_ask(f'bottomk({MOST_NAMED}, {_LATE_NODES})')} | sortByLabel `node` }}}}"
        'Nothing from {{ . | label "node" }} since {{ . | value | humanizeTimestamp }}. {{ end }}'
        "The node is gone, or the way from it to the head, or only its daemon; the other ranks wait "
        f"for those on it. Which ranks these are, and how far they came: {INFO}",
        wait=MISSING_WAIT,
    ),
    Alert(
        "TargetDown",
        "critical",
        f"max by (job, run) ({_UNANSWERED})",
        f"{RUN}: a node that trained does not answer",
        "No answer from: "
        + _list(f"bottomk({MOST_NAMED}, {_WITHOUT_ANSWER})", "instance", "a target")
        + f"{{{{ with {_ask(_LAST_ANSWER)} }}}}; last numbers of "
        "{{ . | first | value | humanizeTimestamp }}{{ end }}"
        + ". The node is gone or cannot be reached, or only the daemon on it is: from here that "
        f"cannot be told. Log in there; what was recorded up to then: {ANOMALIES}",
        wait=DOWN_WAIT,
    ),
    Alert(
        "GradientExploding",
        "warning",
        f"""max by (job, run) (
  max_over_time(ddpprobe_grad_norm[{EXPLODED_WINDOWS[0]}])
  > {EXPLODED} * quantile_over_time(0.5, ddpprobe_grad_norm[{EXPLODED_WINDOWS[1]}] offset {EXPLODED_WINDOWS[0]})
  and max_over_time(ddpprobe_grad_norm[{EXPLODED_WINDOWS[0]}]) > {LEAST_NORM}
)""",
        f"{RUN}: the gradient norm is {{{{ $value | printf `%.3g` }}}}",
        f"That is more than {EXPLODED} times its usual size. Highest on rank "
        + _list(
            f"topk(1, max_over_time(ddpprobe_grad_norm{{%s}}[{EXPLODED_WINDOWS[0]}]))", "rank", "?"
        )
        + f", before the reduction. If it lasts, the next thing is a NaN: {ANOMALIES}",
        wait=HEAD_WAIT,
    ),
    Alert(
        "GradientVanishing",
        "warning",
        f"""max by (job, run) (
  ddpprobe_global_grad_norm
  < {VANISHED:g} * quantile_over_time(0.5, ddpprobe_global_grad_norm[{VANISHED_WINDOWS[1]}] offset {VANISHED_WINDOWS[0]})
)""",
        f"{RUN}: the gradient norm is down to {{{{ $value | printf `%.3g` }}}}",
        "The norm of the reduced gradients is under a thousandth of what it was within the hour: "
        f"next to nothing is learned. Where it is lost along the depth: ddpprobe trace {DIRECTORY} "
        "--site '*' --stat rms",
        wait=VANISHED_WAIT,
    ),
    Alert(
        "AnomalyWarn",
        "warning",
        # A warning that is raised to a page within the wait is told by that. Two detectors find what
        # other alerts tell, and those say more of it.
        f"""max by (job, run, detector) {_grown('ddpprobe_anomalies_total{level="warn", detector!~"coverage|straggler"}', WARN_WINDOW)}""",
        f"{RUN}: {{{{ $labels.detector }}}} warns",
        f"A detector found what somebody should look at. Step, rank and module: {ANOMALIES}",
        wait=HEAD_WAIT,
    ),
    Alert(
        "ChronicOverflow",
        "warning",
        f"""max by (job, run) (increase(ddpprobe_skipped_steps_total[{OVERFLOW_WINDOW}]))
/ max by (job, run) (increase(ddpprobe_steps_total[{OVERFLOW_WINDOW}]))
> {OVERFLOW_SHARE}""",
        f"{RUN}: the GradScaler skips {{{{ $value | humanizePercentage }}}} of the steps",
        "That is no warm-up any more: what is skipped is not trained. Which tensor overflows: "
        f"{ANOMALIES}",
        wait=OVERFLOW_WAIT,
    ),
    Alert(
        "Restarted",
        "warning",
        # What was stopped from outside was meant to be: a planned rescale. An attempt with a daemon of
        # its own, perhaps elsewhere, has a counter that begins with all attempts before it: new is
        # what nobody counted before.
        f"""max by (job, run) (
  increase({_UNASKED}[{WARN_WINDOW}]) > 0 and last_over_time({_UNASKED}[{LAST_WORDS}])
  or {_UNASKED} > on (job, run, state) group_left () {_UNASKED_BEFORE}
  or ({_UNASKED} > 0 unless on (job, run, state) {_UNASKED_BEFORE})
)""",
        f"{RUN} was started again after an end that nobody asked for",
        "Which rank failed, how, and how much was trained twice: " + ANOMALIES,
    ),
    Alert(
        "Straggler",
        "warning",
        f"""max by (job, run) ({_BEHIND})
> {STRAGGLER_SHARE} * max by (job, run) ({_STEP})""",
        f"{RUN} waits for rank " + _list(f"topk(1, {_BEHIND}{{%s}})", "rank", "?"),
        "It works {{ $value | humanizeDuration }} longer on each step than the median of the others (input, "
        "forward, optimizer; under FSDP input alone), and all the others wait for it. Its data "
        f"loader, its device, its neighbours on the node. In which phase each rank is: {TOP}",
        wait=STRAGGLER_WAIT,
    ),
    Alert(
        "CoverageLost",
        "warning",
        # Of a target that has gone the last samples would be all: what it saw less of last comes and
        # goes, perhaps.
        f"""max by (job, run) {_grown('ddpprobe_anomalies_total{detector="coverage"}', WARN_WINDOW)}
or on (job, run)
max by (job, run) (
  max by (job, run, rank) (max_over_time(ddpprobe_sites_observed[{COVERAGE_WINDOWS[0]}]) and ddpprobe_sites_observed)
  < {COVERAGE_KEPT}
  * max by (job, run, rank) (max_over_time(ddpprobe_sites_observed[{COVERAGE_WINDOWS[1]}]))
  unless on (job, run) ddpprobe_job_finished == 1
)""",
        f"ddpprobe sees less of {RUN} than it did",
        "Sites that used to report do not any more: a NaN there would go unnoticed. Which, and what "
        f"may be the cause: {ANOMALIES} and {INFO}",
    ),
    Alert(
        "RecordsLost",
        "warning",
        # More than at some time of the last hour: it ends an hour after the last one was lost. A
        # disk that refuses heartbeats as well refuses the daemon's own journal.
        f"""max by (job, run) (
  min_over_time(ddpprobe_unrecorded_steps[{LOST_WINDOWS[0]}]) > {ON_THEIR_WAY}
  and
  min_over_time(ddpprobe_unrecorded_steps[{LOST_WINDOWS[0]}]) > min_over_time(ddpprobe_unrecorded_steps[{LOST_WINDOWS[1]}])
)
or on (job, run)
max by (job, run) {_grown(f'ddpprobe_records_dropped_total{{reason=~"{DISK}"}}', WARN_WINDOW)}""",
        f"The disk takes no records of {RUN}",
        "Training is not touched by that. Ranks keep what is refused in memory (16 MiB each) and try "
        "again: it is lost where that is full, or refused as well (EFBIG), and a NaN in it goes "
        "unnoticed. Refused with "
        + _list(
            f'group by (reason) (last_over_time(ddpprobe_records_dropped_total{{%s,reason=~"{DISK}"}}[{LAST_WORDS}]) > 0)',
            "reason", "no error that is known",
        )
        + " (ENOSPC and EDQUOT: make room on the disk of the run directory, EFBIG: ulimit -f). "
        f"Which steps are missing: {INFO}",
    ),
    Alert(
        "CollectStale",
        "warning",
        f"""max by (job, run) (
  time() - ddpprobe_last_collect_timestamp_seconds > {STALE_SECONDS}
  unless on (job, run, instance) ddpprobe_job_finished == 1
)""",
        f"{RUN}: a daemon answers with old numbers",
        "Its newest numbers are {{ $value | humanizeDuration }} old, so no other alert of this run can "
        "be trusted: the daemon is short of CPU, or its disk does not answer. Whether records arrive: "
        f"{INFO}",
        wait="1m",
    ),
    Alert(
        "ComponentBlown",
        "warning",
        "min by (job, run, component) (ddpprobe_component_up) == 0",
        f"{RUN}: ddpprobe's {{{{ $labels.component }}}} switched itself off",
        "Training is not touched by that; what the component did is not done any more. Its first "
        f"error is in the log of the rank or of the daemon: {INFO}",
    ),
    Alert(
        "OverheadHigh",
        "warning",
        # By node: above 1,024 ranks one number is of all ranks of a node, and steps are of each.
        f"""max by (job, run) (
  max by (job, run, instance) (ddpprobe_overhead_ratio) > {OVERHEAD}
  and
  max by (job, run, instance) (rate(ddpprobe_probe_seconds_total[{OVERHEAD_WINDOW}]))
  > {OVERHEAD_SECONDS} * max by (job, run, instance) (rate(ddpprobe_steps_total[{OVERHEAD_WINDOW}]))
)""",
        f"{RUN}: ddpprobe takes {{{{ $value | humanizePercentage }}}} of a step",
        "Give install() a budget, such as budget=0.01, or raise every= (DDPPROBE_BUDGET, "
        f"DDPPROBE_EVERY). What it measures itself by: {INFO}",
        wait=OVERHEAD_WAIT,
    ),
    Alert(
        "MemoryLow",
        "warning",
        f"""min by (job, run) (
  ddpprobe_host_memory_available_bytes / ddpprobe_host_memory_total_bytes
) < {MEMORY_LEFT}""",
        f"{RUN}: a node has {{{{ $value | humanizePercentage }}}} of its memory left",
        "At 0 the kernel kills a process, mostly a rank, and the job is lost. The dashboard Ranks "
        f"shows which node, and since when. What each rank holds: {TOP}",
        MEMORY_WAIT,
    ),
    Alert(
        "SeriesDropped",
        "info",
        f"max by (job, run) {_grown('ddpprobe_series_dropped_total', WARN_WINDOW)}",
        f"{RUN} has more series than a target serves",
        "Metrics of some sites are not served; the store has all of them. Narrow include= in "
        f"install(), or read them with ddpprobe trace {DIRECTORY}",
    ),
)  # fmt: skip

# What tells the same of a run in other words is held back while the first of it fires. No circle:
# of two alerts that hold each other back nobody would hear.
_GONE = ("NodeMissing", "TargetDown")
ECHOES = (
    Echo(
        ("FirstCause",),
        ("NonFinite", "GradientExploding", "GradientVanishing", "AnomalyWarn", "ChronicOverflow"),
    ),
    Echo(("NodeMissing",), ("TargetDown",)),
    # The other nodes wait for one that is gone, or lose the connection to it.
    # Not NonFinite: it is for a head that does not answer, and nobody else tells the NaN then.
    Echo(_GONE, ("Stuck", "RankDead", "CollectStale")),
    Echo(_GONE, ("RunLost",), 'rank=""'),
    Echo(("RunLost", "Stuck"), ("RankDead", "Straggler", "AnomalyWarn", "Restarted")),
)
