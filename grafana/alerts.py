"""The alert rules, as data. Selectors and thresholds are here and nowhere else.

Measured traps that shaped the expressions: `unless` binds tighter than `or`, so every `or` is in
parentheses; a NaN is found by `x != x`, never by a comparison; `sum` over ranks multiplies what is
counted once per job.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

REDUCED = "grad|param"  # every rank shows these; they name no culprit
GRADIENTS = "grad_output|grad_input|grad_local"  # a GradScaler makes these overflow on purpose
NONFINITE_WINDOW = "2m"
PAGE_WINDOW = "5m"
WARN_WINDOW = "10m"
# Coverage is judged best against best: what comes and goes (LayerDrop, experts) is in both windows.
COVERAGE_WINDOWS = ("10m", "1h")
COVERAGE_KEPT = 0.9
# Records may be on their way from a GPU: so many are no loss yet, nor is what comes within a while.
ON_THEIR_WAY = 4
LOST_WINDOWS = ("2m", "1h")
# What a disk answers, and what is not tried for a second behind that.
DISK = "E[A-Z0-9]+|io|back_off|journal"
SILENT_SECONDS = 30  # without a heartbeat, of a rank whose process nobody has seen
RUNBOOKS = "docs/runbooks"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule; `name` without the prefix, `wait` as Prometheus writes durations."""

    name: str
    severity: str
    expr: str
    summary: str
    description: str
    wait: str = ""


ALERTS = (
    Alert(
        "NonFinite",
        "critical",
        f"""sum by (job, rank, kind) (increase(ddpprobe_nonfinite_elements_total{{kind!~"{REDUCED}|{GRADIENTS}"}}[{NONFINITE_WINDOW}])) > 0
or
(
  sum by (job, rank, kind) (increase(ddpprobe_nonfinite_elements_total{{kind=~"{GRADIENTS}"}}[{NONFINITE_WINDOW}])) > 0
  unless on (job)
  sum by (job) (increase(ddpprobe_skipped_steps_total[{NONFINITE_WINDOW}])) > 0
)""",
        "NaN or infinity on rank {{ $labels.rank }} of {{ $labels.job }}",
        "Rank {{ $labels.rank }} has non-finite values in {{ $labels.kind }}, before any reduction. "
        "Within a step every rank has them; the first rank and module are in: ddpprobe anomalies RUN.",
    ),
    Alert(
        "LossNotFinite",
        "critical",
        "ddpprobe_loss != ddpprobe_loss or ddpprobe_loss == Inf or ddpprobe_loss == -Inf",
        "The loss of rank {{ $labels.rank }} of {{ $labels.job }} is {{ $value }}",
        "The loss of a sampled step is not a number any more. Stop the run: it does not recover by "
        "itself. DdpprobeNonFinite and ddpprobe anomalies RUN name the origin.",
    ),
    Alert(
        "AnomalyPage",
        "critical",
        # `max`: the head counts for all ranks. `nonfinite` has rules of its own.
        f"""max by (job, detector) (increase(ddpprobe_anomalies_total{{level="page", detector!="nonfinite"}}[{PAGE_WINDOW}])) > 0""",
        "Detector {{ $labels.detector }} pages in {{ $labels.job }}",
        "A detector found what should wake somebody. Step, module and rank are in the exemplar of "
        "ddpprobe_anomalies_total and in: ddpprobe anomalies RUN.",
    ),
    Alert(
        "CoverageLost",
        "warning",
        f"""max by (job) (increase(ddpprobe_anomalies_total{{detector="coverage"}}[{WARN_WINDOW}])) > 0
or
(
  max by (job, rank) (max_over_time(ddpprobe_sites_observed[{COVERAGE_WINDOWS[0]}]))
  < {COVERAGE_KEPT}
  * max by (job, rank) (max_over_time(ddpprobe_sites_observed[{COVERAGE_WINDOWS[1]}]))
  unless on (job) max by (job) (ddpprobe_job_finished) == 1
)""",
        "ddpprobe sees less of {{ $labels.job }} than it did",
        "Sites that used to report do not any more{{ with $labels.rank }}, on rank {{ . }}{{ end }}: "
        "a NaN there would go unnoticed. Which, and what may be the cause: ddpprobe anomalies RUN and "
        "ddpprobe info RUN.",
    ),
    Alert(
        "RecordsLost",
        "warning",
        # Growing, not grown: a disk that is written again ends it. A disk that refuses heartbeats
        # as well refuses the daemon's own journal.
        f"""(
  min_over_time(ddpprobe_unrecorded_steps[{LOST_WINDOWS[0]}]) > {ON_THEIR_WAY}
  and
  min_over_time(ddpprobe_unrecorded_steps[{LOST_WINDOWS[0]}]) > min_over_time(ddpprobe_unrecorded_steps[{LOST_WINDOWS[1]}])
)
or
sum by (job, instance) (increase(ddpprobe_records_dropped_total{{reason=~"{DISK}"}}[{WARN_WINDOW}])) > 0""",
        "Records of {{ $labels.job }} are lost at {{ $labels.instance }}",
        "Training goes on, but what it does is not recorded{{ with $labels.rank }} on rank {{ . }}"
        "{{ end }}: a NaN there would go unnoticed. Make room on the disk of the run directory; "
        "which steps are missing: ddpprobe info RUN.",
    ),
    Alert(
        "FirstFailure",
        "critical",
        """ddpprobe_first_failure_timestamp_seconds
== on (job) group_left ()
min by (job) (ddpprobe_first_failure_timestamp_seconds)""",
        "Rank {{ $labels.rank }} of {{ $labels.job }} is the cause ({{ $labels.signal }})",
        "torchrun ends all other ranks when one fails, so this is the one to look at: its log, and "
        "ddpprobe info RUN for the step. Nodes are compared by their clocks.",
    ),
    Alert(
        "RankDead",
        "critical",
        # A rank that is known to live may be silent for the two minutes of a checkpoint. Once it is
        # judged how the job ended, other rules tell what of that is worth a page.
        f"""(
  (
    time() - ddpprobe_rank_last_heartbeat_timestamp_seconds > {SILENT_SECONDS}
    unless on (job, instance, rank) ddpprobe_rank_up == 1
  )
  or on (job, instance, rank)
  ddpprobe_rank_up == 0
)
unless on (job, instance) ddpprobe_job_state{{state!="running"}}
unless on (job) ddpprobe_first_failure_timestamp_seconds""",
        "Rank {{ $labels.rank }} of {{ $labels.job }} is gone",
        "The process of rank {{ $labels.rank }} at {{ $labels.instance }} does not live any more and "
        "the run has not ended. The others will hang in their next collective.",
        wait="15s",
    ),
)


def rules_yaml() -> str:
    """Return the rule file for Prometheus."""
    rules = []
    for alert in ALERTS:
        name = f"Ddpprobe{alert.name}"
        rules.append(
            {
                "alert": name,
                "expr": _Block(alert.expr + "\n"),
                **({"for": alert.wait} if alert.wait else {}),
                "labels": {"severity": alert.severity},
                "annotations": {
                    "summary": alert.summary,
                    "description": alert.description,
                    "runbook_url": f"{RUNBOOKS}/{name}.md",
                },
            }
        )
    tree = {"groups": [{"name": "ddpprobe", "rules": rules}]}
    head = "# Made by `python -m grafana.build` from grafana/alerts.py; edit that.\n"
    return head + yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=1000)


class _Block(str):
    """A text that YAML writes line by line."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """The safe dumper, and blocks."""


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)
