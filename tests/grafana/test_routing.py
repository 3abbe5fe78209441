"""Alertmanager takes its configuration, sends each alert to somebody, and holds back echoes."""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from .test_rules import ALERTS, ROOT

CONFIG = ROOT / "grafana/alertmanager/alertmanager.yml"
HOW_TO = ROOT / "docs/how-to/alerts.md"
EXAMPLES = re.findall(
    r"^```yaml\n(# ddpprobe up: .*?)^```", HOW_TO.read_text(), re.MULTILINE | re.DOTALL
)


def amtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run amtool; it comes with Debian's package `prometheus-alertmanager`."""
    return subprocess.run(["amtool", *arguments], capture_output=True, text=True, check=False)


def configuration() -> dict[str, Any]:
    tree = yaml.safe_load(CONFIG.read_text())
    assert isinstance(tree, dict)
    return tree


def test_the_configuration_is_that_of_the_code(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grafana.build", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    for made in (CONFIG, HOW_TO):
        assert (tmp_path / made.relative_to(ROOT)).read_text() == made.read_text(), made


def test_amtool_finds_no_fault() -> None:
    done = amtool("check-config", str(CONFIG))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_reaches_somebody_unless_it_is_only_worth_knowing(name: str) -> None:
    severity = ALERTS[name]["labels"]["severity"]
    labels = (f"alertname={name}", f"severity={severity}", "job=j", "run=r")
    done = amtool("config", "routes", "test", f"--config.file={CONFIG}", *labels)
    assert done.stdout.strip() == ("nobody" if severity == "info" else "ddpprobe")


def test_runs_are_told_apart() -> None:
    tree = configuration()
    assert tree["route"]["group_by"] == ["job", "run"]
    assert all(rule["equal"] == ["job", "run"] for rule in tree["inhibit_rules"])


def names_of(matchers: list[str]) -> set[str]:
    """Return the alerts that the first matcher names: each must exist."""
    found = re.fullmatch(r'alertname=~"(.*)"', matchers[0])
    assert found
    names = {name for name in ALERTS if re.fullmatch(found[1], name)}
    assert len(names) == found[1].count("|") + 1
    return names


def test_no_two_alerts_hold_each_other_back() -> None:
    held: dict[str, set[str]] = {}
    for rule in configuration()["inhibit_rules"]:
        for target in names_of(rule["target_matchers"]):
            held.setdefault(target, set()).update(names_of(rule["source_matchers"]))
    list(TopologicalSorter(held).static_order())  # raises CycleError


def test_a_nan_of_a_head_that_does_not_answer_is_told_beside_that() -> None:
    for rule in configuration()["inhibit_rules"]:
        if "DdpprobeNonFinite" in names_of(rule["target_matchers"]):
            assert names_of(rule["source_matchers"]) == {"DdpprobeFirstCause"}


def test_the_how_to_says_of_each_alert_what_holds_it_back() -> None:
    said = dict(re.findall(r"^\| `(\w+)`.*? \| (`.*`) \|$", HOW_TO.read_text(), re.MULTILINE))
    for rule in configuration()["inhibit_rules"]:
        for target in names_of(rule["target_matchers"]):
            for source in names_of(rule["source_matchers"]):
                assert (
                    f"`{source.removeprefix('Ddpprobe')}`" in said[target.removeprefix("Ddpprobe")]
                )


def test_a_page_is_held_back_by_pages_only_and_a_known_death_by_nothing() -> None:
    for rule in configuration()["inhibit_rules"]:
        severities = {
            ALERTS[name]["labels"]["severity"] for name in names_of(rule["source_matchers"])
        }
        assert severities == {"critical"}
        if "DdpprobeRunLost" in names_of(rule["target_matchers"]):
            assert rule["target_matchers"][1:] == ['rank=""']


def test_the_how_to_has_an_example_for_each_way_to_be_told() -> None:
    kinds = {key for text in EXAMPLES for r in yaml.safe_load(text)["receivers"] for key in r}
    assert kinds == {"name", "slack_configs", "pagerduty_configs", "webhook_configs"}


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.splitlines()[0])
def test_amtool_takes_the_examples_in_the_place_of_our_receivers(tmp_path: Path, text: str) -> None:
    tree = configuration()
    example = yaml.safe_load(text)
    tree["route"] |= example.pop("route", {})
    path = tmp_path / "alertmanager.yml"
    path.write_text(yaml.safe_dump(tree | example))
    done = amtool("check-config", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    labels = ("alertname=DdpprobeFirstCause", "severity=critical", "job=j", "run=r")
    told = amtool("config", "routes", "test", f"--config.file={path}", *labels).stdout
    assert "ddpprobe" in told
