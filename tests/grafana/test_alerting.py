"""End to end: real jobs go wrong, and a webhook hears of each once, from `ddpprobe up`."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from ..alerts.job import MODULE
from ..alerts.receiver import Notification
from ..alerts.stage import Job, Stage, stage
from ..conftest import end_daemons
from ..prometheus_harness import until

CULPRIT = 1
FAULTS = ("nan", "killed", "hung")


def quick_configuration(text: str) -> str:
    return re.sub(r"(scrape|evaluation)_interval: \w+", r"\1_interval: 1s", text)


def quick_rules(text: str) -> str:
    """Let what is critical wait no more; what the rules look at, and the warnings, stay."""
    tree = yaml.safe_load(text)
    for rule in (rule for group in tree["groups"] for rule in group["rules"]):
        if rule.get("labels", {}).get("severity") == "critical" and "for" in rule:
            rule["for"] = "2s"
    return yaml.safe_dump(tree, width=10_000)


def quick_notifications(text: str) -> str:
    """Notify at once, and once more as soon as a group says anything else."""
    tree = yaml.safe_load(text)
    tree["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    return yaml.safe_dump(tree)


QUICK = {
    "prometheus/prometheus.yml": quick_configuration,
    "rules/ddpprobe.yml": quick_rules,
    "alertmanager/alertmanager.yml": quick_notifications,
}


def go_wrong(here: Stage, jobs: dict[str, Job]) -> None:
    """Let a NaN, a kill and a hang happen once all is watched; return when they are told."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        watched = pool.map(lambda job: until(lambda: here.is_scraped(job, 2), 60), jobs.values())
        assert all(watched), "\n".join(job.log() for job in jobs.values())
    jobs["nan"].tell("fault")
    jobs["killed"].rank(CULPRIT).kill()
    jobs["hung"].rank(CULPRIT).send_signal(signal.SIGSTOP)
    for name in FAULTS:
        assert until(lambda job=jobs[name]: bool(here.receiver.firing(job.run)), 30), (
            f"{name}: {here.prometheus.get('alerts')}\n{jobs[name].log()}"
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, dict[str, Job]]]:
    """Four jobs on one node: three that went wrong, and one that trained beside them and ended."""
    directory = tmp_path_factory.mktemp("stage")
    try:
        with stage(directory, QUICK) as here:
            jobs = {name: here.job(name) for name in (*FAULTS, "healthy")}
            for name, job in jobs.items():
                job.launch(2, "--fault", name, "--every", 1)
            go_wrong(here, jobs)
            # Seconds after all is told: time for what would be told twice.
            jobs["healthy"].tell("end")
            assert jobs["healthy"].launchers[0].wait(60) == 0, jobs["healthy"].log()
            assert until(lambda: not here.samples(jobs["healthy"], "up{%s}"), 60)
            yield here, jobs
    finally:
        end_daemons(directory)


def the_one(told: tuple[Stage, dict[str, Job]], name: str) -> Notification:
    """Return the notification of a job, of which there is one, with one alert."""
    here, jobs = told
    (notification,) = here.receiver.firing(jobs[name].run)
    (alert,) = notification.firing
    assert alert["severity"] == "critical"
    assert alert["run"] == jobs[name].run
    assert alert["run"].startswith(f"{name}-")
    assert alert["run"] in alert["summary"]
    assert f"ddpprobe anomalies {jobs[name].path}" in alert["description"]
    with urllib.request.urlopen(alert["runbook_url"], timeout=30) as page:
        assert page.read().decode().startswith(f"# {alert['alertname']}\n")
    return notification


def test_a_nan_is_told_once_with_its_step_rank_and_module(told):
    notification = the_one(told, "nan")
    assert notification.names == ["DdpprobeFirstCause"]
    step = told[1]["nan"].at
    for said in (f"step {step},", f"rank {CULPRIT}", MODULE, "forward"):
        assert said in notification.text


def test_a_killed_rank_is_told_once_with_its_signal(told):
    notification = the_one(told, "killed")
    assert notification.names == ["DdpprobeRunLost"]
    assert f"rank {CULPRIT} was the first to fail (SIGKILL)" in notification.text


def test_a_hung_rank_is_told_once_with_its_phase(told):
    notification = the_one(told, "hung")
    assert notification.names == ["DdpprobeStuck"]
    assert f"hangs: look at rank {CULPRIT}" in notification.text
    assert re.search(
        rf"Rank {CULPRIT} is in (data|forward|backward|optimizer)\.", notification.text
    )


def test_of_a_run_that_is_well_nothing_is_told(told):
    here, jobs = told
    assert here.receiver.of(jobs["healthy"].run) == []
