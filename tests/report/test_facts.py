"""What ran, in a few words: of every attempt, not of the newest alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpprobe.cli.main import main
from ddpprobe.reader.run import open_run
from ddpprobe.records.step import Site
from ddpprobe.report.story import gather
from ddpprobe.report.tables import MOST_SAID, facts
from ddpprobe.report.verdict import judge
from ddpprobe.rundir import framing
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter

from ..made_runs import NODE, Made, record


@dataclass
class Chosen(Made):
    """A run whose script switched detectors off."""

    off: tuple[str, ...] = ()

    def _meta(self, rank: int) -> dict[str, Any]:
        return {**super()._meta(rank), "detectors": dict.fromkeys(self.off)}


def shown(
    path: Path, *off: tuple[str, ...], notes: tuple[tuple[int, str], ...] = ()
) -> dict[str, str]:
    for attempt, names in enumerate(off):
        made = Chosen(path, ranks=1, attempt=attempt, off=names)
        made.write([record(0, attempt, attempt=attempt)])
        for step, what in notes:
            said = {"event": "note", "step": step, "what": what, "config": {}}
            made.writer(0).append_json(framing.LIFE, said)
        made.close()
    return dict(facts(gather(open_run(path))))


def beat(made: Made, step: int, sampled: int) -> None:
    """Let rank 0 say how far it came."""
    writer = HeartbeatWriter(made.run.heartbeat(made.attempt, NODE, 0))
    writer.beat(step=step, micro=0, state=STATES.index("closed"), steps=step + 1, skipped=0,
                sampled=sampled, phase_seconds=(0.1, 0.3, 0.6, 0.0), probe_seconds=0.0)  # fmt: skip
    writer.close()


def test_detectors_that_only_earlier_attempts_had_off_are_named_with_these(tmp_path: Path) -> None:
    off = shown(tmp_path / "run", ("straggler",), ("straggler",), ("straggler",), ())
    assert off["detectors off"] == "attempts 0-2: straggler"


def test_each_attempt_that_differs_is_named_the_newest_first(tmp_path: Path) -> None:
    off = shown(tmp_path / "run", ("straggler",), ("coverage", "desync"), ("straggler",))
    assert off["detectors off"] == "attempts 0, 2: straggler; attempt 1: coverage, desync"


def test_where_all_attempts_say_the_same_none_is_named(tmp_path: Path) -> None:
    told = shown(tmp_path / "run", ("straggler",), ("straggler",), notes=((-1, "a"), (3, "b")))
    assert told["detectors off"] == "straggler"
    assert told["noted"] == "a (before the first step), b (after step 3)"
    assert "detectors off" not in shown(tmp_path / "other", (), ())


def test_of_many_attempts_the_newest_are_named(tmp_path: Path) -> None:
    names = ("straggler", "coverage", "desync", "slowdown", "resume", "targets", "stuck_data",
             "grad_spike", "level_shift", "mode_flip")  # fmt: skip
    off = shown(tmp_path / "run", *((name,) for name in names))["detectors off"]
    assert off.startswith("attempt 9: mode_flip; attempt 8: level_shift; ")
    assert off.endswith(f"; {len(names) - MOST_SAID} more in earlier attempts")


def test_the_first_loss_that_is_not_finite_is_looked_for_in_every_step(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step in (0, 10, 20):
        said = {"loss": 1.0} | {f"loss@-{n}": 1.0 for n in range(1, 10) if step}
        bad = said | ({"loss": float("nan"), "loss@-7": float("nan")} if step == 20 else {})
        made.write([record(0, step, scalars={0: said}), record(1, step, scalars={1: bad})])
    (first, *_) = judge(gather(open_run(made.close().path))).aftermath
    assert first == "The loss is first not finite at step 13, on rank 1."


def test_the_steps_are_those_that_info_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    made.write(record(0, step) for step in (0, 10))
    beat(made, 14, sampled=2)
    path = made.close().path
    assert main(["info", str(path)]) == 0
    assert "steps      0 to 14, recorded up to 10\n" in capsys.readouterr().out
    assert dict(facts(gather(open_run(path))))["steps"] == "0 to 14, recorded up to 10"


def test_of_a_run_without_a_sampled_step_it_is_told_how_far_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    made.writer(0)
    beat(made, 7, sampled=0)
    path = made.close().path
    assert main(["info", str(path)]) == 4
    assert "steps      up to 7, none recorded\n" in capsys.readouterr().out
    assert dict(facts(gather(open_run(path))))["steps"] == "up to 7, none recorded"


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ((1.0, 1.004), "the mean of the ranks' own"),
        ((2.0, 2.0), "2 x the mean of the ranks' own"),
        ((1.0, 2.0, 1.0), "1 to 2 x the mean of the ranks' own"),
        ((), None),
    ],
)
def test_what_the_reduction_made_of_the_gradients_is_told(
    factors: tuple[float, ...], told: str | None, tmp_path: Path
) -> None:
    made = Made(tmp_path / "run", ranks=2)
    sites = Site("a.weight", "grad_local"), Site("a.weight", "grad", placement="replicated")
    for step, factor in enumerate(factors):
        own = np.random.default_rng(step).normal(size=(2, 50))
        for rank in (0, 1):
            rows = own[rank], factor * own.mean(axis=0)
            counts = np.array([[50, 0, 0, 0, 0, 1, 1]] * 2)
            values = np.array([[row.min(), row.max(), row.sum(), row @ row] for row in rows])
            made.write([record(rank, step, sites=sites, counts=counts, values=values, digests={})])
    made.close()
    assert dict(facts(gather(open_run(made.path)))).get("gradients reduced to") == told
