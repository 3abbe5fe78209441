"""What CONTRIBUTING.md says it takes to add one of something is what it takes.

Its diffs are applied to a copy of the package, which real processes then run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from .distributed import daemon_harness
from .made_runs import Made, record
from .waiting import PATIENCE

HOME = Path(__file__).parents[1]
_CONTRIBUTING = (HOME / "CONTRIBUTING.md").read_text()
RECIPES = re.findall(r"^```diff\n(.*?)^```$", _CONTRIBUTING, re.MULTILINE | re.DOTALL)
METRIC = "ddpprobe_rank_step"
PAGES = 'ddpprobe_anomalies_total{detector="loss_floor",level="page"}'


def apply(diff: str, root: Path) -> None:
    """Apply a diff without line numbers: what a hunk takes away stands once in the file."""
    for name, hunks in re.findall(r"^\+\+\+ b/(.+)\n((?:[@ +-](?!-- ).*\n)+)", diff, re.MULTILINE):
        path = root / name
        text = path.read_text() if path.exists() else ""
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(x[1:] for x in lines if x[0] in kept) for kept in (" -", " +"))
            assert text.count(old) == 1, f"{name} has this {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        path.write_text(text)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what belongs together, with one more of each."""
    root = tmp_path_factory.mktemp("house")
    for part in ("ddpprobe", "grafana", "docs/how-to", "docs/reference"):
        shutil.copytree(HOME / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HOME / "docs/detection.md", root / "docs")
    for diff in RECIPES:
        apply(diff, root)
    return root


def python(house: Path, *words: object) -> str:
    """Run Python with the copy; return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(house)}
    command = [sys.executable, "-P", *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ddpprobe(house: Path, *words: object) -> str:
    code = "import sys; from ddpprobe.cli.main import main; main(sys.argv[1:])"
    return python(house, "-c", code, *words)


def test_a_recipe_is_at_most_twenty_lines_to_write() -> None:
    assert RECIPES
    for diff in RECIPES:
        assert len(re.findall(r"^[+-](?![+-]{2} )", diff, re.MULTILINE)) <= 20


def test_a_detector_pages_and_its_counter_is_there_before_it_does(house, tmp_path) -> None:
    with daemon_harness.harness(tmp_path) as job:
        made = Made(job.run.path, ranks=1, pid=os.getpid())
        made.write(record(0, step) for step in range(5))
        daemon = job.daemon(prefix=["env", f"PYTHONPATH={house}"])
        daemon_harness.wait(lambda: 'ddpprobe_loss{rank="0"} 0.2' in job.metrics())
        assert f"{PAGES} 0.0" in job.metrics()
        made.write([replace(record(0, 5), scalars={0: {"loss": 0.0}})])
        daemon_harness.wait(lambda: f"{PAGES} 1.0" in job.metrics())
        made.close()
        assert daemon.wait(30 * PATIENCE) == 0
    found = json.loads(ddpprobe(house, "anomalies", made.path, "--json"))["anomalies"]
    assert [(a["detector"], a["step"], a["first_cause"]) for a in found] == [
        ("loss_floor", 5, True)
    ]
    page = tmp_path / "page.html"
    ddpprobe(house, "report", made.path, "-o", page)
    assert "Loss too small to be true at step 5" in page.read_text()


def test_a_detector_is_listed_with_its_settings_and_obeys_them(house, tmp_path) -> None:
    listed = ddpprobe(house, "replay", "--list")
    assert "loss_floor: Pages at a loss below the floor" in listed
    assert re.search(r"^ +floor +1e-09 +the smallest loss that is believed$", listed, re.MULTILINE)
    run = Made(tmp_path / "run", ranks=1).whole(5).close()
    words = ("replay", run.path, "--detector", "loss_floor", "--set", "floor=0.3", "--json")
    again = json.loads(ddpprobe(house, *words))["verdicts"]
    assert [a["step"] for a in again if a["detector"] == "loss_floor"] == [3, 4]


def test_a_metric_is_served_with_what_the_rank_said(house, tmp_path) -> None:
    said = python(house, "-c", "from grafana.sample import views; from ddpprobe.metrics.render "
        "import render; *_, last = views(); print(render(last, False).decode())")  # fmt: skip
    assert f'{METRIC}{{rank="0"}} 60.0\n' in said
    assert f"# HELP {METRIC} Step that the rank is in;" in said
    assert f"# TYPE {METRIC} gauge" in said


def test_a_statistic_is_read_off_the_store(house, tmp_path) -> None:
    made = Made(tmp_path / "run", ranks=1).whole(3)
    words = ("trace", made.close().path, "--site", "blocks.0.*", "--json", "--stat")
    low, high, spread = (
        json.loads(ddpprobe(house, *words, stat))["series"][0]["values"]
        for stat in ("min", "max", "range")
    )
    assert spread == [b - a for a, b in zip(low, high, strict=True)]
    assert all(spread)


def test_a_verb_runs_and_its_help_says_what_it_does_and_how_it_ends(house, tmp_path) -> None:
    run = Made(tmp_path / "run", ranks=1).whole(3).close()
    assert ddpprobe(house, "steps", run.path) == "2\n"
    assert "Say how far a run has come" in ddpprobe(house, "--help")
    assert "exit codes" in ddpprobe(house, "steps", "--help")


def test_the_reference_lists_what_was_added(house, tmp_path) -> None:
    python(house, "-m", "grafana.build", tmp_path)
    metrics, detectors = (
        (tmp_path / f"docs/reference/{name}.md").read_text() for name in ("metrics", "detectors")
    )
    assert f"| `{METRIC}` | gauge | `rank` | steps | Step that the rank is in;" in metrics
    assert "coverage, loss_floor, rank_lost" in metrics
    assert "| `loss_floor` | Loss too small to be true | Pages at a loss below" in detectors
    assert "| `loss_floor` | `floor` | 1e-09 | the smallest loss that is believed |" in detectors
