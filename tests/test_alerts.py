"""Every alert fires when it must, is silent when it must, and each of its parts is needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpprobe.metrics import METRICS

ROOT = Path(__file__).parent.parent
RULES = ROOT / "grafana/rules/ddpprobe.yml"
UNIT_TESTS = ROOT / "grafana/rules/ddpprobe_test.yml"
NAMES = (
    "NonFinite", "LossNotFinite", "AnomalyPage", "CoverageLost", "RecordsLost", "FirstFailure", "RankDead",
)  # fmt: skip

# What is replaced in an alert's expression (once, or everywhere), and must be noticed.
MUTANTS = [
    ("NonFinite", 'kind!~"grad|param|', 'kind!~"param|'),
    ("NonFinite", 'kind!~"grad|param|', 'kind!~"grad|'),
    ("NonFinite", "|grad_local", ""),
    ("NonFinite", "unless on (job)", "or on (job)"),
    ("NonFinite", "unless on (job)", "unless on ()"),
    ("NonFinite", "by (job, rank, kind)", "by (job, kind)"),
    ("NonFinite", "> 0", "> 1000"),
    ("NonFinite", "[2m]", "[10s]"),
    ("NonFinite", "[2m]", "[10m]"),
    ("NonFinite", "skipped_steps_total[2m]", "skipped_steps_total[10s]"),
    ("NonFinite", "skipped_steps_total[2m]", "skipped_steps_total[1h]"),
    ("NonFinite", '=~"grad_output|', '=~"'),
    ("NonFinite", '=~"grad_output|grad_input|', '=~"grad_output|'),
    ("NonFinite", '!~"grad|param|grad_output|', '!~"grad|param|'),
    ("NonFinite", "param|grad_output|grad_input|", "param|grad_output|"),
    ("LossNotFinite", "ddpprobe_loss != ddpprobe_loss or ", ""),
    ("LossNotFinite", "or ddpprobe_loss == -Inf", ""),
    ("LossNotFinite", "or ddpprobe_loss == Inf ", ""),
    ("LossNotFinite", "== -Inf", "< 0"),
    ("LossNotFinite", "== Inf", "> 1e9"),
    ("AnomalyPage", 'level="page", ', ""),
    ("AnomalyPage", ', detector!="nonfinite"', ""),
    ("AnomalyPage", "max by (job, detector)", "max by (job, instance, detector)"),
    ("AnomalyPage", "> 0", ">= 0"),
    ("AnomalyPage", "[5m]", "[30s]"),
    ("AnomalyPage", "[5m]", "[1h]"),
    ("CoverageLost", 'detector="coverage"', 'detector!=""'),
    ("CoverageLost", "max by (job) (incr", "max by (job, instance) (incr"),
    ("CoverageLost", "[10m])) > 0", "[10s])) > 0"),
    ("CoverageLost", "[10m])) > 0", "[1h])) > 0"),
    ("CoverageLost", "> 0", ">= 0"),
    ("CoverageLost", "or\n", "unless\n"),
    ("CoverageLost", "max by (job, rank)", "max by (job)"),
    ("CoverageLost", "(max_over_time(ddpprobe_sites_observed[10m]))", "(ddpprobe_sites_observed)"),
    ("CoverageLost", "observed[10m]", "observed[1h]"),
    ("CoverageLost", "observed[1h]", "observed[20m]"),
    ("CoverageLost", "< 0.9", "< 0.5"),
    ("CoverageLost", "< 0.9", "< 1"),
    ("CoverageLost", "unless on (job) max", "unless on () max"),
    ("CoverageLost", "  unless on (job) max by (job) (ddpprobe_job_finished) == 1\n", ""),
    ("RecordsLost", "> 4", "> 1000"),
    ("RecordsLost", "> 4", "> 0"),
    ("RecordsLost", "min_over_time(ddpprobe_unrecorded_steps[2m])", "ddpprobe_unrecorded_steps"),
    ("RecordsLost", "unrecorded_steps[1h]", "unrecorded_steps[4m]"),
    ("RecordsLost", "> min_over_time", ">= min_over_time"),
    ("RecordsLost", "  and\n", "  or\n"),
    ("RecordsLost", "or\nsum", "unless\nsum"),
    ("RecordsLost", "reason=~", "reason!~"),
    ("RecordsLost", "E[A-Z0-9]+|", ""),
    ("RecordsLost", "|back_off", ""),
    ("RecordsLost", "[10m])) > 0", "[10m])) > 1000"),
    ("RecordsLost", "[10m])) > 0", "[10m])) >= 0"),
    ("RecordsLost", "[10m])) > 0", "[1h])) > 0"),
    ("RecordsLost", "unrecorded_steps[2m]", "unrecorded_steps[20m]"),
    ("FirstFailure", "min by", "max by"),
    ("FirstFailure", "on (job)", "on ()"),
    ("FirstFailure", "by (job)", ""),
    ("RankDead", 'unless on (job, instance) ddpprobe_job_state{state!="running"}\n', ""),
    ("RankDead", "unless on (job, instance) ddpprobe_job", "unless on () ddpprobe_job"),
    ("RankDead", 'state!="running"', ""),
    ("RankDead", 'state!="running"', 'state="ended"'),
    ("RankDead", 'state!="running"', 'state=~"ended|stopped"'),
    ("RankDead", "unless on (job) ddpprobe_first_failure_timestamp_seconds", ""),
    ("RankDead", "unless on (job) ddpprobe_first", "unless on () ddpprobe_first"),
    ("RankDead", "unless on (job, instance, rank) ddpprobe_rank_up == 1", ""),
    ("RankDead", "> 30", "> 3000"),
    ("RankDead", "ddpprobe_rank_up == 0", "ddpprobe_rank_up == 2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def rules() -> dict[str, dict[str, Any]]:
    tree = yaml.safe_load(RULES.read_text())
    return {rule["alert"]: rule for group in tree["groups"] for rule in group["rules"]}


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; it comes with Debian's package `prometheus`, which `make test` installs."""
    return subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_the_rules_are_those_of_the_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grafana.build", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "grafana/rules/ddpprobe.yml").read_text() == RULES.read_text()


def test_promtool_finds_no_fault() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_tests_pass() -> None:
    done = promtool("test", "rules", str(UNIT_TESTS), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    """The unit tests of each alert alone, by its name: all of them take seconds of CPU."""
    tree = yaml.safe_load(UNIT_TESTS.read_text())
    found = {}
    for name in NAMES:
        own = []
        for case in tree["tests"]:
            checks = [c for c in case["alert_rule_test"] if c["alertname"] == f"Ddpprobe{name}"]
            own += [{**case, "alert_rule_test": checks}] if checks else []
        found[name] = {**tree, "tests": own}
    return found


def judged(rule: dict[str, Any], cases: dict[str, Any], where: Path) -> bool:
    """Whether a rule, by itself, passes its own unit tests."""
    tree = {"groups": [{"name": "ddpprobe", "rules": [rule]}]}
    (where / "ddpprobe.yml").write_text(json.dumps(tree))  # JSON is YAML, and soon written
    (where / UNIT_TESTS.name).write_text(json.dumps(cases))
    assert promtool("check", "rules", "ddpprobe.yml", cwd=where).returncode == 0
    return promtool("test", "rules", UNIT_TESTS.name, cwd=where).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_passes_its_own_unit_tests_by_itself(
    rules: dict[str, dict[str, Any]], cases: dict[str, Any], tmp_path: Path, name: str
) -> None:
    assert judged(rules[f"Ddpprobe{name}"], cases[name], tmp_path)


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_mutant_is_caught_by_the_unit_tests_of_its_alert(
    rules: dict[str, dict[str, Any]], cases: dict[str, Any], tmp_path: Path,
    name: str, old: str, new: str,
) -> None:  # fmt: skip
    rule = dict(rules[f"Ddpprobe{name}"])
    assert old in rule["expr"], "this mutant does not apply any more"
    rule["expr"] = rule["expr"].replace(old, new)
    assert not judged(rule, cases[name], tmp_path)


def test_an_alert_without_its_wait_is_caught(
    rules: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    hasty = [{k: v for k, v in rule.items() if k != "for"} for rule in rules.values()]
    tree = {"groups": [{"name": "ddpprobe", "rules": hasty}]}
    (tmp_path / "ddpprobe.yml").write_text(yaml.safe_dump(tree))
    shutil.copy(UNIT_TESTS, tmp_path)
    assert promtool("test", "rules", UNIT_TESTS.name, cwd=tmp_path).returncode != 0


def test_every_alert_has_both_kinds_of_tests() -> None:
    fires, silent = set(), set()
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for check in test["alert_rule_test"]:
            (fires if check["exp_alerts"] else silent).add(check["alertname"])
    assert fires == silent == {f"Ddpprobe{n}" for n in NAMES}


def test_every_alert_says_what_and_where_to_read_on(rules: dict[str, dict[str, Any]]) -> None:
    assert set(rules) == {f"Ddpprobe{n}" for n in NAMES}
    for name, rule in rules.items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.stem == name
        assert page.read_text().startswith(f"# {name}\n")


def test_every_metric_in_a_rule_exists(rules: dict[str, dict[str, Any]]) -> None:
    table = {m.name for m in METRICS}
    for rule in rules.values():
        used = set(re.findall(r"ddpprobe_\w+", rule["expr"]))
        assert used
        assert used <= table
