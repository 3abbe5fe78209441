"""Panels show what they must of made series: their queries are asked by promtool, in no time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from ..prometheus_harness import filled_in, panels_of
from .test_rules import RECORDINGS, promtool

TARGET = 'job="j",run="r",instance="a"'
ANSWER = re.compile(r'^ +expr: (".*"), time: .*\n +exp: .*\n +got: (.*)$', re.MULTILINE)
STEP = 15  # seconds from one scrape to the next
# What Grafana takes for an interval of less than that, both in seconds.
INTERVALS = {17.5: 15, 25: 20, 45: 30, 90: 60, 210: 120, 450: 300, 750: 600, 1200: 900}
COLUMN = 66  # pixels: a panel has as many moments as pixels, if nothing else is said
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
# And after two minutes another attempt, of the same daemon.
RESTARTED = {
    f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x40 stale _x8 1x150",
    f'ddpprobe_job_state{{{TARGET},state="crashed"}}': "_x41 1x8 stale",
    f"ddpprobe_attempt{{{TARGET}}}": "0x49 1x150",
}


def shown(
    folder: Path, series: Mapping[str, str], board: str, title: str, *, minute: int = 20,
    hours: float = 0.5,
) -> list[tuple[dict[str, str], float]]:  # fmt: skip
    """Return (labels, value) of all that a panel finds of some series, with its words in "legend".

    Its shown time are so many hours before that minute. promtool says what it found where other
    samples were expected: so an unlikely one is.
    """
    [panel] = [p for p in panels_of(f"ddpprobe-{board}") if p["title"] == title]
    points = panel.get("maxDataPoints", COLUMN * panel["gridPos"]["w"])
    interval = next(i for most, i in INTERVALS.items() if hours * 3600 / points < most)
    chosen = {"job": "j", "run": "r", "__interval": f"{interval}s"}
    legends = {
        filled_in(t["expr"], 0, hours * 3600, **chosen): t["legendFormat"] for t in panel["targets"]
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


def test_a_short_end_is_seen_in_a_long_time_by_tiles_of_any_width(tmp_path: Path) -> None:
    """A daemon serves the end of a run for two minutes, and nothing is there after it."""
    short = {name: v.replace("159", "6 stale") for name, v in CRASHED.items()}
    up = f'ddpprobe_rank_up{{{TARGET},rank="3"}}'
    steps = f'ddpprobe_steps_total{{{TARGET},rank="3"}}'
    series = short | {
        f'{LOST},rank="3"}}': "_x41 1x6 stale",
        **dict.fromkeys(LOST_AT, "_x41 615x6 stale"),
        up: "1x40 0x7 stale",
        steps: "0+10x41 410x6 stale",
        f'ddpprobe_loss{{{TARGET},rank="3"}}': "2x40 1x7 stale",
        f"ddpprobe_last_collect_timestamp_seconds{{{TARGET}}}": "0+15x47 stale",
        f"up{{{TARGET}}}": "1x47 stale",
        f'ddpprobe_job_info{{{TARGET},directory="/d"}}': "1x47 stale",
    }
    for hours in (0.5, 12, 48):
        for board, title, value in (
            ("run", "State", 6),
            ("run", "Step", 410),
            ("run", "Last finite loss", 1),
            ("run", "Ranks lost", 1),
            ("fleet", "Failed or hung", 1),
        ):
            [(_, seen)] = shown(tmp_path, series, board, title, hours=hours)
            assert seen == value, (title, hours)
        for title in ("Verdict", "Since"):
            [(labels, when)] = shown(tmp_path, series, "run", title, hours=hours)
            assert (labels["legend"], when) == ("rank_lost in step 412, rank 3", 615_000), hours
        [(labels, _)] = shown(tmp_path, series, "run", "Faults, in order of time", hours=hours)
        assert labels["rank"] == "3"


def test_a_hang_is_one_verdict_with_its_step(tmp_path: Path) -> None:
    hung = {
        f'ddpprobe_job_state{{{TARGET},state="hung"}}': "1x200",
        f'ddpprobe_rank_stuck{{{TARGET},rank="3",phase="forward"}}': "_x41 1x159",
        f'ddpprobe_rank_last_heartbeat_timestamp_seconds{{{TARGET},rank="3"}}': "600x200",
    }
    lost = {f'{LOST},rank="3",phase="forward"}}': "_x41 1x159", **LOST_AT}
    assert verdict(tmp_path, hung) == ["All wait for rank 3 (forward)"]
    assert verdict(tmp_path, hung, lost) == ["All wait for rank 3 in step 412 (forward)"]


def test_the_only_rank_that_a_lone_warning_blames_is_named(tmp_path: Path) -> None:
    running = {f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x200"}

    def warned(detector: str) -> dict[str, str]:
        name = f'ddpprobe_anomalies_total{{{TARGET},detector="{detector}",level="warn"}}'
        return {name: "0x50 2x150"}

    def blamed(rank: int) -> dict[str, str]:
        name = f'ddpprobe_rank_anomalies_total{{{TARGET},rank="{rank}",level="warn"}}'
        return {name: "0x50 2x150"}

    def said(*series: Mapping[str, str]) -> list[str]:
        return sorted(verdict(tmp_path, running, *series))

    assert said(warned("straggler"), blamed(3)) == ["warning: straggler, rank 3"]
    assert said(warned("straggler")) == ["warning: straggler"]
    assert said(warned("straggler"), blamed(3), blamed(4)) == ["warning: straggler"]
    both = ["warning: grad_spike", "warning: straggler"]
    assert said(warned("straggler"), warned("grad_spike"), blamed(3)) == both


def test_a_phase_without_a_step_has_no_time_a_step(tmp_path: Path) -> None:
    """It would be infinite, and Grafana draws nothing then of the whole graph."""
    ours = f'{TARGET},rank="0"'
    series = {
        f"ddpprobe_steps_total{{{ours}}}": "0+15x40 600x159",
        f'ddpprobe_step_phase_seconds_total{{{ours},phase="forward"}}': "0+6x200",
    }
    title = "Time per step by phase"
    [(_, seconds)] = shown(tmp_path, series, "run", title, minute=9)
    assert seconds == pytest.approx(0.4)
    assert shown(tmp_path, series, "run", title) == []


def test_of_many_ranks_the_time_line_shows_who_went_first_or_is_waited_for(tmp_path: Path) -> None:
    ranks, gone, stuck = 40, 30, 7
    series = {
        f'ddpprobe_rank_stuck{{{TARGET},rank="{stuck}",phase="forward"}}': "_x41 1x159",
        f"ddpprobe_paused{{{TARGET}}}": "0x200",
    }
    for rank in range(ranks):
        ours = f'{TARGET},rank="{rank}"'
        series[f"ddpprobe_rank_info{{{ours}}}"] = "1x200"
        seen = 41 + 2 * rank if rank >= ranks - gone else 200
        series[f"ddpprobe_rank_up{{{ours}}}"] = f"1x{seen} 0x{200 - seen}"
        series[f"ddpprobe_rank_last_heartbeat_timestamp_seconds{{{ours}}}"] = "0+15x200"
    found = shown(tmp_path, series, "run", "Job, ranks and detectors", minute=45, hours=0.75)
    named = {labels["rank"]: value for labels, value in found if "rank" in labels}
    first = range(ranks - gone, ranks - gone + 19)
    assert named == {str(stuck): 13} | {str(rank): 12 for rank in first}


def test_a_run_that_goes_on_with_a_fault_stands_above_one_that_is_well(tmp_path: Path) -> None:
    running = {f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x200"}
    nan = {f'{LOST.replace("rank_lost", "nonfinite")},rank="3"}}': "_x41 1x159", **LOST_AT}

    def state(*series: Mapping[str, str]) -> float:
        found = shown(tmp_path, merged(series), "fleet", "Runs, the worst first")
        [value] = [v for labels, v in found if {*labels} == {"job", "run", "legend"} and v < 100]
        return value

    [panel] = [p for p in panels_of("ddpprobe-fleet") if p["title"] == "Runs, the worst first"]
    [override] = [
        o for o in panel["fieldConfig"]["overrides"] if o["matcher"]["options"] == "state"
    ]
    [words] = [p["value"] for p in override["properties"] if p["id"] == "mappings"]
    options = words[0]["options"]
    well, bad, crashed = state(running), state(running, nan), state(CRASHED, nan)
    assert bad > crashed > well
    assert options[f"{bad:g}"]["text"] == "running, with a fault"
    assert (options[f"{well:g}"]["text"], options[f"{crashed:g}"]["text"]) == ("running", "crashed")


def test_the_state_of_a_run_that_goes_on_with_a_fault_is_not_green(tmp_path: Path) -> None:
    running = {f'ddpprobe_job_state{{{TARGET},state="running"}}': "1x200"}
    nan = {f'{LOST.replace("rank_lost", "nonfinite")},rank="3"}}': "_x41 1x159", **LOST_AT}
    [panel] = [p for p in panels_of("ddpprobe-run") if p["title"] == "State"]
    words = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    for series, said in (
        ((running,), ("running", "green")),
        ((running, nan), ("running, with a fault", "red")),
        ((CRASHED, nan), ("crashed", "red")),
    ):
        [(_, value)] = shown(tmp_path, merged(series), "run", "State")
        assert (words[f"{value:g}"]["text"], words[f"{value:g}"]["color"]) == said


SITE = f'ddpprobe_site_rms{{{TARGET},fqn="blocks.0",kind="output"}}'
# Where nothing is good: what is shown then, and what makes something of it.
NONE_IS_GOOD = {
    ("run", "Faults, in order of time", "detector"): {f"{LOST}}}": "_x41 1x159", **LOST_AT},
    ("run", "Non-finite elements by kind", "legend"): {
        f'ddpprobe_nonfinite_elements_total{{{TARGET},rank="1",kind="output"}}': "0+1x200"
    },
    ("ranks", "Verdicts by rank", "legend"): {
        f'ddpprobe_rank_anomalies_total{{{TARGET},rank="1",level="page"}}': "0+1x200"
    },
    ("modules", "Verdicts on modules", "legend"): {
        f'ddpprobe_anomalies_total{{{TARGET},detector="coverage",level="warn"}}': "0+1x200"
    },
    ("modules", "Without a finite value now", "fqn"): {SITE: "1x40 stale"},
}


@pytest.mark.parametrize("where", NONE_IS_GOOD, ids=lambda where: where[1])
def test_none_is_said_only_of_a_run_that_was_asked(
    tmp_path: Path, where: tuple[str, str, str]
) -> None:
    board, title, label = where
    [panel] = [p for p in panels_of(f"ddpprobe-{board}") if p["title"] == title]
    assert panel["fieldConfig"]["defaults"]["noValue"].startswith("no data")

    def said(*series: Mapping[str, str]) -> set[str]:
        return {labels[label] for labels, _ in shown(tmp_path, merged(series), board, title)}

    assert said(dict.fromkeys(WATCHED, "_x200")) == set()
    assert said({SITE: "1x200"}) == {"none"}
    bad = said({SITE: "1x200"}, NONE_IS_GOOD[where])
    assert bad
    assert "none" not in bad
