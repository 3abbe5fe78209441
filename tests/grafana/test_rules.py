"""Every alert fires when it must, is silent when it must, says so, and each of its parts is needed."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpprobe.metrics.table import METRICS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RULES = ROOT / "grafana/rules/ddpprobe.yml"
FIRE, SAY = "alerts_fire.yml", "alerts_say.yml"
NAMES = (
    "FirstCause", "RunLost", "Stuck", "NonFinite", "RankDead", "NodeMissing", "TargetDown", "GradientExploding",
    "GradientVanishing", "AnomalyWarn", "ChronicOverflow", "Restarted", "Straggler", "CoverageLost",
    "RecordsLost", "CollectStale", "ComponentBlown", "OverheadHigh",
    "MemoryLow", "SeriesDropped",
)  # fmt: skip

# What their cases say is about 15 seconds; what those of the others say holds at every 30 as well.
FINE = {"RunLost", "NodeMissing"}

# What is replaced in an alert's expression, or in that of a series it uses, everywhere, and must be
# noticed.
MUTANTS = [
    ("FirstCause", '{detector!="rank_lost"}', ""),
    ("FirstCause", "job, run, detector, step, rank,", "job, detector, step, rank,"),
    ("FirstCause", "detector, step, rank,", "detector, rank,"),
    ("FirstCause", "step, rank, fqn,", "step, fqn,"),
    ("FirstCause", "unless on (job, run) ddpprobe_first_cause_info", ""),
    ("FirstCause", "unless on (job, run) ddpprobe_first_cause_info", "unless on (job) ddpprobe_first_cause_info"),
    ("FirstCause", "unless on (job, run) ddpprobe_first_cause_info", "unless on (job, run) ddpprobe_job_info"),
    ("FirstCause", "[5m]", "[1m]"),
    ("FirstCause", "offset 1h", "offset 30m"),
    ("FirstCause", "offset 1h", "offset 2h"),
    ("FirstCause", "[1h] offset", "[1m] offset"),
    ("FirstCause", "(max_over_time(ddpprobe_attempt[5m]))", "(max_over_time(ddpprobe_attempt[5m])) - 1"),
    ("RunLost", "min by (job, run)", "max by (job, run)"),
    ("RunLost", "min by (job, run)", "min by (job)"),
    ("RunLost", "[5m]", "[30s]"),
    ("RunLost", "unless on (job, run, instance) ddpprobe_job_info", ""),
    ("RunLost", "[5m]) == 1", "[5m]) >= 0"),
    ("RunLost", "unless on (job, run) (ddpprobe_job_state", "unless on () (ddpprobe_job_state"),
    ("RunLost", "group_left () min by (job, run) (min_over", "group_left () max by (job, run) (max_over"),
    ("RunLost", "crashed|vanished", "vanished"),
    ("RunLost", "crashed|vanished", "crashed"),
    ("RunLost", "crashed|vanished", "crashed|vanished|unknown"),
    ("RunLost", "crashed|vanished", "crashed|vanished|stopped"),
    ("RunLost", "crashed|vanished", "crashed|vanished|ended"),
    ("RunLost", '{detector="rank_lost"}', '{detector="desync"}'),
    ("RunLost", "end_is_cause:max[5m]) == 1", "end_is_cause:max[5m]) >= 0"),
    ("RunLost", "end_is_cause:max[5m]", "end_is_cause:max[15s]"),
    ("RunLost", "or 0 * ddpprobe_job_info", ""),
    ("RunLost", 'state="unknown"', 'state=~".+"'),
    ("RunLost", 'state="unknown"', 'state="vanished"'),
    ("RunLost", 'and on (job, run, instance) (ddpprobe_job_state{state="unknown"}', 'and on (job, run) (ddpprobe_job_state{state="unknown"}'),
    ("RunLost", "unless on (job, run) (\n  job_run_instance:ddpprobe_job_stuck", "unless on () (\n  job_run_instance:ddpprobe_job_stuck"),
    ("RunLost", 'state=~"hung"', 'state=~"stopped"'),
    ("RunLost", 'signal=~"SIG.+",signal!="SIGABRT"', 'signal="SIGSEGV"'),
    ("RunLost", 'signal=~"SIG.+",signal!="SIGABRT"', 'signal=~"SIG.+"'),
    ("RunLost", "or on (job, run, instance) (last_over_time(job_run_instance:ddpprobe_job_hung:max[5m]) == 1)) unless", ") unless"),
    ("RunLost", "max_over_time(job_run_instance:ddpprobe_job_stuck:min3m[1h]) == 1", "vector(1)"),
    ("RunLost", 'detector!="rank_lost"', 'detector="rank_lost"'),
    ("RunLost", 'detector!="rank_lost"', 'detector=~".+"'),
    ("RunLost", 'state!~"running|hung"', 'state="running"'),
    ("RunLost", 'and on (job, run, instance) (ddpprobe_job_state{state!~"running|hung"}', 'and on (job, run) (ddpprobe_job_state{state!~"running|hung"}'),
    ("RunLost", "unless on (job, run) ddpprobe_restart_awaited == 1", ""),
    ("RunLost", "unless on (job, run) ddpprobe_restart_awaited", "unless on (job) ddpprobe_restart_awaited"),
    ("RunLost", "unless on (job, run) ddpprobe_restart_awaited == 1", "unless on (job, run) ddpprobe_restart_awaited"),
    ("RunLost", "up == 0", "up == 1"),
    ("RunLost", "unless on (job, run) (up", "unless on (job) (up"),
    ("RunLost", "[1h]) == 1", "[1h]) >= 0"),
    ("Stuck", 'state=~"hung"', 'state=~"crashed"'),
    ("Stuck", "[5m]", "[10s]"),
    ("Stuck", "[5m]) == 1", "[5m]) >= 0"),
    ("Stuck", "and on (job, run, instance) max_over_time(job_run_instance:ddpprobe_job_stuck:min3m[1h]) == 1", ""),
    ("Stuck", " unless on (job, run) max by (job, run) (ddpprobe_rank_up) == 0", ""),
    ("Stuck", "max by (job, run) (ddpprobe_rank_up) == 0", "min by (job, run) (ddpprobe_rank_up) == 0"),
    ("Stuck", "and job_run_instance:ddpprobe_job_stuck:max offset 3m == 1", ""),
    ("Stuck", "and on (job, run) max by (job, run) (ddpprobe_steps_total) > 0", ""),
    ("Stuck", "15m])) == 0", "15m])) == 1"),
    ("Stuck", "15m])) == 0", "15m])) < 1e9"),
    ("Stuck", "sum by (job, run) (increase", "min by (job, run) (increase"),
    ("Stuck", "15m", "5m"),
    ("Stuck", "offset 15m", "offset 1m"),
    ("Stuck", "and on (job, run) max by (job, run) (ddpprobe_rank_up) == 1", ""),
    ("Stuck", "max by (job, run) (ddpprobe_rank_up) == 1", "min by (job, run) (ddpprobe_rank_up) == 1"),
    ("Stuck", "unless on (job, run) max by (job, run) (ddpprobe_paused) == 1", ""),
    ("Stuck", "(ddpprobe_paused) == 1", "(ddpprobe_paused) >= 0"),
    ("Stuck", "unless on (job, run) max by (job, run) (ddpprobe_paused)", "unless on () max by (job, run) (ddpprobe_paused)"),
    ("Stuck", 'unless on (job, run) ddpprobe_job_state{state!="running"}', ""),
    ("Stuck", 'unless on (job, run) ddpprobe_job_state{state!="running"}', 'unless on (job) ddpprobe_job_state{state!="running"}'),
    ("NonFinite", 'kind!~"param|grad|buffer|', 'kind!~"grad|buffer|'),
    ("NonFinite", 'kind!~"param|grad|buffer|', 'kind!~"param|buffer|'),
    ("NonFinite", 'kind!~"param|grad|buffer|', 'kind!~"param|grad|'),
    ("NonFinite", "|optim_state|", "|"),
    ("NonFinite", "|grad_local", ""),
    ("NonFinite", '=~"grad_output|', '=~"'),
    ("NonFinite", '=~"grad_output|grad_input|', '=~"grad_output|'),
    ("NonFinite", "optim_state|grad_output|", "optim_state|"),
    ("NonFinite", "optim_state|grad_output|grad_input|", "optim_state|grad_output|"),
    ("NonFinite", "    unless on (job, run) (increase", "    unless on () (increase"),
    ("NonFinite", "    unless on (job, run) (increase", "    or on (job, run) (increase"),
    ("NonFinite", "skipped_steps_total[5m]) > 0", "skipped_steps_total[10s]) > 0"),
    ("NonFinite", "skipped_steps_total[5m]) > 0", "skipped_steps_total[1h]) > 0"),
    ("NonFinite", "(ddpprobe_skipped_steps_total > 0", "(ddpprobe_skipped_steps_total > 1000"),
    ("NonFinite", "> 0 or", "> 1000 or"),
    ("NonFinite", "> 0 unless", "> 1000 unless"),
    ("NonFinite", "> 0 unless", ">= 0 unless"),
    ("NonFinite", "[5m]", "[10s]"),
    ("NonFinite", "[1h] offset 5m", "[1m] offset 5m"),
    ("NonFinite", "ddpprobe_loss != ddpprobe_loss or ", ""),
    ("NonFinite", "abs(ddpprobe_loss)", "ddpprobe_loss"),
    ("NonFinite", "== Inf", "> 1e9"),
    ("NonFinite", 'detector="nonfinite"', 'detector="desync"'),
    ("NonFinite", "\nunless on (job, run) (", "\nunless on (job) ("),
    ("NonFinite", 'reason="set_aside"', 'reason="late"'),
    ("NonFinite", "unless on (job, run, instance)", "unless on (job, run)"),
    ("RankDead", 'unless on (job, run, instance) ddpprobe_job_state{state!="running"}\n', ""),
    ("RankDead", "unless on (job, run, instance) ddpprobe_job", "unless on (job, instance) ddpprobe_job"),
    ("RankDead", 'state!="running"', 'state=~".+"'),
    ("RankDead", 'state!="running"', 'state=~"ended|unknown"'),
    ("RankDead", 'state!="running"', 'state=~"ended|stopped"'),
    ("RankDead", 'state!="running"', 'state=~"stopped|unknown"'),
    ("RankDead", "unless on (job, run) ddpprobe_first_failure_timestamp_seconds", ""),
    ("RankDead", "unless on (job, run) ddpprobe_first", "unless on (job) ddpprobe_first"),
    ("RankDead", "unless on (job, run, instance, rank) ddpprobe_rank_up == 1", ""),
    ("RankDead", "> 30", "> 3000"),
    ("RankDead", "ddpprobe_rank_up == 0", "ddpprobe_rank_up == 2"),
    ("RankDead", "max by (job, run) (", "max by (job, run, rank) ("),
    ("NodeMissing", "> 60", "> 600"),
    ("NodeMissing", "> 60", "> 14"),
    ("NodeMissing", 'unless on (job, run, instance) ddpprobe_job_state{state!~"running|hung"}', ""),
    ("NodeMissing", "unless on (job, run, instance)", "unless on (job, run)"),
    ("NodeMissing", "unless on (job, run, instance)", "unless on (job, instance)"),
    ("NodeMissing", "running|hung", "running"),
    ("NodeMissing", "max by (job, run)", "max by (job, run, node)"),
    ("TargetDown", "up == 0", "up == 1"),
    ("TargetDown", "max by (job, run) (", "max by (job, run, instance) ("),
    ("TargetDown", "and on (job, run, instance)", "unless on (job, run, instance)"),
    ("TargetDown", "[1h]) == 1", "[1h]) >= 0"),
    ("TargetDown", "[1h]", "[4m]"),
    ("TargetDown", "[1h]", "[3h]"),
    ("TargetDown", "last_over_time", "max_over_time"),
    ("TargetDown", "last_over_time", "min_over_time"),
    ("TargetDown", "max by (job, run, instance)", "max by (job, instance)"),
    ("TargetDown", "0 * ddpprobe", "1 * ddpprobe"),
    ("GradientExploding", "> 10 *", "> 3 *"),
    ("GradientExploding", "> 10 *", "> 30 *"),
    ("GradientExploding", "grad_norm[5m]", "grad_norm[1m]"),
    ("GradientExploding", "[15m] offset 5m", "[15m]"),
    ("GradientExploding", "quantile_over_time(0.5", "quantile_over_time(1"),
    ("GradientExploding", "quantile_over_time(0.5", "quantile_over_time(0"),
    ("GradientExploding", "and max_over_time(ddpprobe_grad_norm[5m]) > 1", ""),
    ("GradientExploding", "max by (job, run) (", "max by (job, run, rank) ("),
    ("GradientVanishing", "< 0.001", "< 0.1"),
    ("GradientVanishing", "< 0.001", "< 0.00001"),
    ("GradientVanishing", "offset 10m", ""),
    ("GradientVanishing", "[1h] offset 10m", "[1h] offset 1m"),
    ("GradientVanishing", "quantile_over_time(0.5", "quantile_over_time(0"),
    ("GradientVanishing", "max by (job, run)", "max by (job)"),
    ("AnomalyWarn", 'level="warn", ', ""),
    ("AnomalyWarn", "coverage|straggler", "coverage"),
    ("AnomalyWarn", "coverage|straggler", "straggler"),
    ("AnomalyWarn", "max by (job, run, detector)", "max by (job, run, instance, detector)"),
    ("AnomalyWarn", "max by (job, run, detector)", "max by (job, run)"),
    ("AnomalyWarn", "> 0 and last", ">= 0 and last"),
    ("AnomalyWarn", "> 0 unless", ">= 0 unless"),
    ("AnomalyWarn", "> 0 unless", "> 1000 unless"),
    ("AnomalyWarn", "[10m]", "[30s]"),
    ("AnomalyWarn", "}[5m])", "}[1h])"),
    ("AnomalyWarn", "10m", "30m"),
    ("ChronicOverflow", "> 0.1", "> 0.01"),
    ("ChronicOverflow", "> 0.1", "> 0.5"),
    ("ChronicOverflow", "[10m]", "[20m]"),
    ("ChronicOverflow", "max by (job, run)", "max by (job)"),
    ("ChronicOverflow", "/ max", "/ 0 * max"),
    ("Restarted", "stopped|ended", "ended"),
    ("Restarted", "stopped|ended", "stopped"),
    ("Restarted", "stopped|ended", "stopped|ended|hung"),
    ("Restarted", "max by (job, run)", "max by (job, run, state)"),
    ("Restarted", "[10m]) > 0", "[10m]) >= 0"),
    ("Restarted", '> 0 and last_over_time(ddpprobe_restarts_total{state!~"stopped|ended"}[5m])', "> 0"),
    ("Restarted", "[10m]) > 0", "[10m]) > 1000"),
    ("Restarted", "> on (job, run, state)", ">= on (job, run, state)"),
    ("Restarted", "> on (job, run, state)", "< on (job, run, state)"),
    ("Restarted", "> 0 unless on (job, run, state)", "> 0 unless on (job, run, state, instance)"),
    ("Restarted", "> 0 unless", "> 1000 unless"),
    ("Restarted", "> 0 unless", ">= 0 unless"),
    ("Restarted", "10m", "30m"),
    ("Straggler", "> 0.2 *", "> 0.5 *"),
    ("Straggler", "> 0.2 *", "> 0.01 *"),
    ("Straggler", "quantile by (job, run) (0.5,", "quantile by (job, run) (1,"),
    ("Straggler", "quantile by (job, run)", "quantile by (job)"),
    ("Straggler", " unless topk by (job, run) (1, job_run_rank:ddpprobe_own_work_seconds:mean5m)", ""),
    ("Straggler", " unless topk by (job, run) (1, job_run_rank:ddpprobe_data_seconds:mean5m)", ""),
    ("Straggler", "topk by (job, run)", "topk by (job)"),
    ("Straggler", "data|forward|optimizer", "forward"),
    ("Straggler", "data|forward|optimizer", "data|forward|optimizer|backward"),
    ("Straggler", 'phase=~".+"', 'phase=~"data"'),
    ("Straggler", 'phase=~"data"', 'phase=~"forward"'),
    ("Straggler", '"of", "data"', '"of", ""'),
    ("Straggler", "(job, run, rank) (\n  (job", "(job, run, rank) (\n  0 * (job"),
    ("CoverageLost", 'detector="coverage"', 'detector!=""'),
    ("CoverageLost", "max by (job, run) (incr", "max by (job, run, instance) (incr"),
    ("CoverageLost", 'coverage"}[10m]) > 0', 'coverage"}[10s]) > 0'),
    ("CoverageLost", 'coverage"}[10m]) > 0', 'coverage"}[1h]) > 0'),
    ("CoverageLost", "> 0 and last", ">= 0 and last"),
    ("CoverageLost", "\nor on (job, run)\n", "\nunless on (job, run)\n"),
    ("CoverageLost", "max by (job, run, rank)", "max by (job, run)"),
    ("CoverageLost", "max by (job, run, rank)", "max by (job, rank)"),
    ("CoverageLost", "max_over_time(ddpprobe_sites_observed[10m]) and ", ""),
    ("CoverageLost", "[10m]) and ddpprobe_sites_observed", "[10m])"),
    ("CoverageLost", "observed[10m]", "observed[1h]"),
    ("CoverageLost", "observed[1h]", "observed[20m]"),
    ("CoverageLost", "< 0.9", "< 0.5"),
    ("CoverageLost", "< 0.9", "< 1"),
    ("CoverageLost", "unless on (job, run) ddpprobe", "unless on () ddpprobe"),
    ("CoverageLost", "  unless on (job, run) ddpprobe_job_finished == 1\n", ""),
    ("RecordsLost", "> 4", "> 1000"),
    ("RecordsLost", "> 4", "> 0"),
    ("RecordsLost", "min_over_time(ddpprobe_unrecorded_steps[2m])", "ddpprobe_unrecorded_steps"),
    ("RecordsLost", "unrecorded_steps[1h]", "unrecorded_steps[4m]"),
    ("RecordsLost", "> min_over_time", ">= min_over_time"),
    ("RecordsLost", "  and\n", "  or\n"),
    ("RecordsLost", "\nor on (job, run)\n", "\nunless on (job, run)\n"),
    ("RecordsLost", "reason=~", "reason!~"),
    ("RecordsLost", "E[A-Z0-9]+|", ""),
    ("RecordsLost", "|back_off", ""),
    ("RecordsLost", "|io", ""),
    ("RecordsLost", "|journal", ""),
    ("RecordsLost", "[10m]) > 0", "[10m]) > 1000"),
    ("RecordsLost", "[10m]) > 0", "[10m]) >= 0"),
    ("RecordsLost", "[10m]) > 0", "[1h]) > 0"),
    ("RecordsLost", "unrecorded_steps[2m]", "unrecorded_steps[20m]"),
    ("RecordsLost", "max by (job, run) (\n", "max by (job, run, rank) (\n"),
    ("CollectStale", "> 120", "> 1200"),
    ("CollectStale", "> 120", "> 10"),
    ("CollectStale", "  unless on (job, run, instance) ddpprobe_job_finished == 1\n", ""),
    ("CollectStale", "unless on (job, run, instance)", "unless on (job, run)"),
    ("CollectStale", "finished == 1", "finished >= 0"),
    ("CollectStale", "max by (job, run) (", "max by (job, run, instance) ("),
    ("ComponentBlown", "min by", "max by"),
    ("ComponentBlown", "== 0", "== 1"),
    ("ComponentBlown", "job, run, component", "job, component"),
    ("OverheadHigh", "> 0.05", "> 0.03"),
    ("OverheadHigh", "> 0.05", "> 0.2"),
    ("OverheadHigh", "max by (job, run) (", "max by (job, run, instance) ("),
    ("OverheadHigh", "max by (job, run, instance) (rate(ddpprobe_steps_total[5m]))", "rate(ddpprobe_steps_total[5m])"),
    ("OverheadHigh", "max by (job, run, instance) (rate(ddpprobe_probe", "max by (job, run, instance, rank) (rate(ddpprobe_probe"),
    ("OverheadHigh", "> 0.01 *", "> 0.004 *"),
    ("OverheadHigh", "> 0.01 *", "> 0.05 *"),
    ("OverheadHigh", "  and\n", "  or\n"),
    ("MemoryLow", "< 0.05", "< 0.02"),
    ("MemoryLow", "< 0.05", "< 0.1"),
    ("MemoryLow", "min by", "max by"),
    ("MemoryLow", "min by (job, run)", "min by (job, run, instance)"),
    ("SeriesDropped", "max by (job, run)", "max by (job, run, instance)"),
    ("SeriesDropped", "> 0 and last", ">= 0 and last"),
    ("SeriesDropped", "> 0 unless", "> 1000 unless"),
    ("SeriesDropped", "10m", "30m"),
]  # fmt: skip


@functools.cache
def groups() -> list[dict[str, Any]]:
    found = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in found for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in groups() if "alert" in rule}
RECORDINGS = [rule for rule in groups() if "record" in rule]


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; it comes with Debian's package `prometheus`, which `make test` installs.

    A quarter of its time would be its garbage collector's.
    """
    return subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, "GOGC": "800"},
    )  # fmt: skip


@functools.cache
def cases_in(file: str) -> list[dict[str, Any]]:
    """Return all cases of a file, which nobody changes: to parse it takes a third of a second."""
    return list(yaml.safe_load((HERE / file).read_text())["tests"])


def cases_of(file: str, name: str) -> list[dict[str, Any]]:
    """Return the cases of one alert alone: all of them take seconds of CPU."""
    own = []
    for case in cases_in(file):
        checks = [c for c in case["alert_rule_test"] if c["alertname"] == f"Ddpprobe{name}"]
        own += [{**case, "alert_rule_test": checks}] if checks else []
    return own


def rules_for(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an alert with the recorded series that it uses, and those that they use."""
    found = [rule]
    for recording in reversed(RECORDINGS):  # what is used is recorded before
        if any(recording["record"] in each["expr"] for each in found):
            found.insert(0, recording)
    return found


def without_texts(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key != "annotations"}


def judged(
    rules: list[dict[str, Any]], cases: list[dict[str, Any]], where: Path, interval: str = "15s"
) -> subprocess.CompletedProcess[str]:
    """Return promtool's word on some rules by themselves."""
    tree = {"groups": [{"name": "ddpprobe", "rules": rules}]}
    (where / "ddpprobe.yml").write_text(json.dumps(tree))  # JSON is YAML, and soon written
    every = {"rule_files": ["ddpprobe.yml"], "evaluation_interval": interval, "tests": cases}
    (where / "tests.yml").write_text(json.dumps(every))
    return promtool("test", "rules", "tests.yml", cwd=where)


def mutants_of(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of each mutant of an alert by the place of the mutant in `MUTANTS`, or "wait".

    It stands behind the names of these rules. Recorded series that a mutation leaves as they are,
    and are known by their own names, are not among them.
    """
    rules = rules_for(without_texts(ALERTS[f"Ddpprobe{name}"]))
    mutants = {}
    for place, (whose, old, new) in enumerate(MUTANTS):
        if whose == name:
            applies = any(old in rule["expr"] for rule in rules)
            assert applies, f"{(name, old, new)} does not apply any more"
            changed = [{**rule, "expr": rule["expr"].replace(old, new)} for rule in rules]
            mutants[str(place)] = renamed(changed, str(place))
    if "for" in rules[-1]:
        changed = [*rules[:-1], {k: v for k, v in rules[-1].items() if k != "for"}]
        mutants["wait"] = renamed(changed, "wait")
    return mutants


def renamed(rules: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return an alert, and those series it uses that are not as recorded, under other names."""
    *series, alert = rules
    others: list[str] = []

    def other(expr: str) -> str:
        for name in others:
            expr = expr.replace(name, f"{name}_{mark}")
        return expr

    own = []
    for rule in series:
        if rule not in RECORDINGS or any(name in rule["expr"] for name in others):
            own.append({"record": f"{rule['record']}_{mark}", "expr": other(rule["expr"])})
            others.append(rule["record"])
    return [*own, {**alert, "alert": f"{alert['alert']}_{mark}", "expr": other(alert["expr"])}]


@functools.cache
def caught(name: str) -> frozenset[str]:
    """Return which mutants of an alert its cases notice.

    Most of what promtool takes is the same for all of them, so they see the same series side by
    side. One that cannot be evaluated (many series where one must be) ends a case for all: it is
    noticed, and the rest is tried again without it. The alert itself stands among them: its cases
    must hold at the interval of the evaluation, half as dear as the one that the others have.

    Case by case, and only mutants that nothing has noticed yet have to stand the next one: those of
    hours, which have a sample a minute, come last, and take most of the time.
    """
    found: set[str] = set()
    *shared, alert = rules_for(without_texts(ALERTS[f"Ddpprobe{name}"]))
    interval = "15s" if name in FINE else "30s"
    mutants = {**mutants_of(name), "itself": renamed([alert], "itself")}
    for case in sorted(cases_of(FIRE, name), key=lambda case: case["interval"] == "1m"):
        broken = {""}
        while broken:
            tried = {mark: rules for mark, rules in mutants.items() if mark not in found}
            broken, failed, said = noticed(shared, tried, case, interval)
            assert "itself" not in broken | failed, said
            found |= broken or failed
    assert found
    return frozenset(found)


def noticed(
    shared: list[dict[str, Any]], tried: dict[str, list[dict[str, Any]]],
    case: dict[str, Any], interval: str,
) -> tuple[set[str], set[str], str]:  # fmt: skip
    """Return which of some rules cannot be evaluated, which fail a case, and promtool's words."""
    checks = [
        {**check, "alertname": f"{check['alertname']}_{mark}"}
        for mark in tried for check in case["alert_rule_test"]
    ]  # fmt: skip
    rules = [*shared, *(rule for mark in tried for rule in tried[mark])]
    with tempfile.TemporaryDirectory() as where:
        done = judged(rules, [{**case, "alert_rule_test": checks}], Path(where), interval)
    said = done.stdout + done.stderr
    broken = set(re.findall(r"^ +rule: \S+_(\w+), time: ", said, re.MULTILINE))
    failed = set(re.findall(r"^ +alertname: \w+_(\w+), time: ", said, re.MULTILINE))
    assert bool(done.returncode) == bool(broken | failed), said
    return broken, failed, said


def test_the_rules_are_those_of_the_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grafana.build", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "grafana/rules/ddpprobe.yml").read_text() == RULES.read_text()


def test_promtool_finds_no_fault() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_fires_when_it_must_and_not_when_it_must_not(tmp_path: Path, name: str) -> None:
    rule = without_texts(ALERTS[f"Ddpprobe{name}"])
    done = judged(rules_for(rule), cases_of(FIRE, name), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_says_what_where_since_when_and_what_to_type(tmp_path: Path, name: str) -> None:
    rule = dict(ALERTS[f"Ddpprobe{name}"])
    said = rule["annotations"]
    rule["annotations"] = {key: said[key] for key in ("summary", "description")}
    cases = cases_of(SAY, name)
    assert cases
    done = judged(rules_for(rule), cases, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_mutant_is_caught_by_the_cases_of_its_alert(name: str, old: str, new: str) -> None:
    assert str(MUTANTS.index((name, old, new))) in caught(name)


@pytest.mark.parametrize("name", [n for n in NAMES if "for" in ALERTS[f"Ddpprobe{n}"]])
def test_an_alert_without_its_wait_is_caught(name: str) -> None:
    assert "wait" in caught(name)


def test_every_alert_has_both_kinds_of_cases_and_a_mutant() -> None:
    fires, silent = set(), set()
    for case in cases_in(FIRE):
        for check in case["alert_rule_test"]:
            (fires if check["exp_alerts"] else silent).add(check["alertname"])
    assert fires == silent == set(ALERTS) == {f"Ddpprobe{n}" for n in NAMES}
    assert {name for name, _, _ in MUTANTS} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_an_alert_lead_somewhere(name: str) -> None:
    rule = ALERTS[f"Ddpprobe{name}"]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url", "dashboard_url"}
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page.stem == f"Ddpprobe{name}"
    text = page.read_text()
    assert text.startswith(f"# Ddpprobe{name}\n")
    # What it means, what to type, and what else it can be.
    assert re.findall("^## (.*)$", text, re.MULTILINE)[:3] == [
        "What it means", "What to type", "What else it can be",
    ]  # fmt: skip
    assert "ddpprobe " in text
    board = rule["annotations"]["dashboard_url"].partition("/d/")[2].partition("?")[0]
    uid = json.loads((ROOT / f"grafana/dashboards/{board}.json").read_text())["uid"]
    assert uid == board


def test_no_runbook_is_of_an_alert_that_is_gone() -> None:
    assert {page.stem for page in (ROOT / "docs/runbooks").glob("*.md")} == set(ALERTS)


def test_every_metric_in_a_rule_exists() -> None:
    table = {m.name for m in METRICS}
    for rule in groups():
        texts = " ".join(rule.get("annotations", {}).values())
        # Neither a recorded series, which has colons, nor the name of the dashboard.
        used = set(re.findall(r"(?<![:\w/])ddpprobe_\w+", rule["expr"] + texts))
        assert used or "job_run" in rule["expr"]
        assert used <= table
