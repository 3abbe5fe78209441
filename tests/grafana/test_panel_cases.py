"""Panels show what they must of made series: their queries are asked by promtool, in no time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from ..prometheus_harness import QUERIES, filled_in
from .test_rules import RECORDINGS, promtool

TARGET = 'job="j",run="r",instance="a"'
ANSWER = re.compile(r'^ +expr: (".*"), time: .*\n +exp: .*\n +got: (.*)$', re.MULTILINE)
STEP = 15  # seconds from one scrape to the next
# What every run has: 50 minutes of a daemon that answers.
WATCHED = {
    f'ddpprobe_job_info{{{TARGET},directory="/d"}}': "1x200",
    f"ddpprobe_last_collect_timestamp_seconds{{{TARGET}}}": "0+15x200",
    f"up{{{TARGET}}}": "1x200",
}
# Up to minute 10 a run trains, then it is over.
CRASHED = {
    f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x40 stale",
    f'ddpprobe_job_state{{{TARGET},state="crashed"}}': "_x41 1x159",
}
LOST = f'ddpprobe_first_cause_info{{{TARGET},detector="rank_lost",step="412"'
LOST_AT = {f"ddpprobe_first_cause_timestamp_seconds{{{TARGET}}}": "_x41 615x159"}
FAILURE = f"ddpprobe_first_failure_timestamp_seconds{{{TARGET}"
KILLED = {f'{FAILURE},rank="3",signal="SIGKILL"}}': "_x41 614x159"}
# And behind two minutes another attempt, of the same daemon.
RESTARTED = {
    f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x40 stale _x8 1x150",
    f'ddpprobe_job_state{{{TARGET},state="crashed"}}': "_x41 1x8 stale",
    f"ddpprobe_attempt{{{TARGET}}}": "0x49 1x150",
}


def shown(
    folder: Path, series: Mapping[str, str], board: str, title: str, *, minute: int = 20
) -> list[tuple[dict[str, str], float]]:
    """Return (labels, value) of all that a panel finds of some series, with its words in "legend".

    Its shown time are the 30 minutes before that minute. promtool says what it found where other
    samples were expected: so an unlikely one is.
    """
    legends = {
        filled_in(t["expr"], 0, 1800, job="j", run="r", __interval=f"{STEP}s"): t["legendFormat"]
        for name, panel, t in QUERIES
        if (name, panel) == (f"ddpprobe-{board}", title)
    }
    assert legends
    case = {
        "interval": f"{STEP}s",
        "input_series": [{"series": s, "values": v} for s, v in (WATCHED | dict(series)).items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "never", "value": 0}],
            }
            for expr in legends
        ],
    }
    tree = {"rule_files": ["rules.yml"], "evaluation_interval": f"{STEP}s", "tests": [case]}
    recorded = {"groups": [{"name": "recorded", "rules": RECORDINGS}]}
    (folder / "rules.yml").write_text(json.dumps(recorded))
    (folder / "case.yml").write_text(json.dumps(tree))
    said = promtool("test", "rules", "case.yml", cwd=folder)
    answers = re.findall(ANSWER, said.stdout + said.stderr)
    assert len(answers) == len(legends), said.stdout + said.stderr
    found = []
    for expr, samples in answers:
        for written, value in re.findall(r"\{(.*?)\} (\S+?)(?:, |$)", samples):
            labels = dict(re.findall(r'(\w+)="(.*?)"', written))
            words = legends[json.loads(expr)]
            labels["legend"] = re.sub(r"\{\{(\w+)\}\}", lambda m, x=labels: x.get(m[1], ""), words)
            found.append((labels, float(value)))
    return found


def verdict(folder: Path, *series: Mapping[str, str]) -> list[str]:
    """Return the words of the verdict on a run."""
    found = shown(folder, merged(series), "run", "Verdict")
    return [labels["legend"] for labels, _ in found]


def fleet(folder: Path, *series: Mapping[str, str]) -> list[tuple[str, float]]:
    """Return (verdict, since) of the fleet's lines."""
    found = shown(folder, merged(series), "fleet", "Runs, the worst first")
    return [(labels["verdict"], value) for labels, value in found if "verdict" in labels]


def merged(series: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: values for each in series for name, values in each.items()}


def test_an_end_is_the_verdict_also_where_no_rank_alone_is_guilty(tmp_path: Path) -> None:
    lost = {f"{LOST}}}": "_x41 1x159", **LOST_AT}
    assert verdict(tmp_path, CRASHED, lost) == ["rank_lost in step 412"]
    assert fleet(tmp_path, CRASHED, lost) == [("rank_lost", 615_000)]


def test_an_end_says_its_step_and_the_signal_of_its_rank(tmp_path: Path) -> None:
    lost = {f'{LOST},rank="3",phase="backward"}}': "_x41 1x159", **LOST_AT}
    said = "rank_lost in step 412, rank 3 (SIGKILL), backward"
    assert verdict(tmp_path, CRASHED, KILLED, lost) == [said]
    assert fleet(tmp_path, CRASHED, KILLED, lost) == [("rank_lost, rank 3, backward", 615_000)]


def test_a_failure_that_another_attempt_followed_is_told_as_such_and_alone(tmp_path: Path) -> None:
    gone_on = "It goes on; in an earlier attempt rank 3 was the first to fail (SIGKILL)"
    lost = {f'{LOST},rank="3"}}': "_x41 1x8 stale", **LOST_AT}
    killed = dict.fromkeys(KILLED, "_x41 614x8 stale")
    assert verdict(tmp_path, RESTARTED, killed, lost) == [gone_on]
    assert fleet(tmp_path, RESTARTED, killed, lost) == []


def test_an_attempt_with_a_daemon_of_its_own_goes_on_as_well(tmp_path: Path) -> None:
    lost = {f'{LOST},rank="3"}}': "_x41 1x20 stale", **LOST_AT}
    first = {f"ddpprobe_attempt{{{TARGET}}}": "0x61 stale"}
    killed = dict.fromkeys(KILLED, "_x41 614x20 stale")
    other = TARGET.replace('"a"', '"b"')
    moved = {
        f'ddpprobe_job_state{{{other},state="running"}}': "_x49 1x150",
        f"ddpprobe_attempt{{{other}}}": "_x49 1x150",
        **{name: values.replace("159", "20 stale") for name, values in CRASHED.items()},
    }
    gone_on = "It goes on; in an earlier attempt rank 3 was the first to fail (SIGKILL)"
    assert verdict(tmp_path, first, moved, killed, lost) == [gone_on]
    assert fleet(tmp_path, first, moved, killed, lost) == []


def test_what_was_counted_before_the_first_scrape_is_no_good_run(tmp_path: Path) -> None:
    running = {f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x200"}
    warned = f'ddpprobe_anomalies_total{{{TARGET},detector="init_scale",level="warn"}}'
    assert verdict(tmp_path, running, {warned: "1x200"}) == ["warning: init_scale"]
    assert verdict(tmp_path, running, {warned: "0x200"}) == ["Nothing wrong was found"]
    elements = f'ddpprobe_nonfinite_elements_total{{{TARGET},rank="1",kind="output"}}'
    for values, count in (("512x200", 512), ("512x50 612x150", 612), ("0x200", 0), ("7", 7)):
        [(_, value)] = shown(tmp_path, {elements: values}, "run", "Non-finite elements", minute=29)
        assert value == pytest.approx(count, rel=0.02)


def test_one_of_two_ranks_is_measured_by_the_other_one(tmp_path: Path) -> None:
    series = {}
    for rank, seconds in enumerate((1.5, 6)):
        ours = f'job="j",run="r",instance="a",rank="{rank}"'
        series[f'ddpprobe_rank_info{{{ours},pid="{rank}",device="cpu"}}'] = "1x200"
        series[f"ddpprobe_rank_up{{{ours}}}"] = "1x200"
        series[f"ddpprobe_steps_total{{{ours}}}"] = "0+15x200"
        series[f'ddpprobe_step_phase_seconds_total{{{ours},phase="forward"}}'] = f"0+{seconds}x200"
    found = shown(tmp_path, series, "ranks", "Own work, compared")
    times = {labels["rank"]: value for labels, value in found if labels["legend"] == "rank 1"}
    assert times == {"1": pytest.approx(4)}  # and so it turns red
    alone = {name: values for name, values in series.items() if 'rank="1"' not in name}
    [(_, value), _] = shown(tmp_path, alone, "ranks", "Own work, compared")
    assert value == pytest.approx(1)
