"""What ran, in a few words: of every attempt, not of the newest alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpprobe.reader.run import open_run
from ddpprobe.report.story import gather
from ddpprobe.report.tables import MOST_SAID, facts
from ddpprobe.rundir import framing

from ..made_runs import Made, record


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


def test_detectors_that_only_earlier_attempts_had_off_are_named_with_these(tmp_path: Path) -> None:
    off = shown(tmp_path / "run", ("straggler",), ("straggler",), ("straggler",), ())
    assert off["detectors off"] == "attempts 0-2: straggler"


def test_each_attempt_that_differs_is_named_the_newest_first(tmp_path: Path) -> None:
    off = shown(tmp_path / "run", ("straggler",), ("coverage", "desync"), ("straggler",))
    assert off["detectors off"] == "attempts 0, 2: straggler; attempt 1: coverage, desync"


def test_where_all_attempts_say_the_same_none_is_named(tmp_path: Path) -> None:
    told = shown(tmp_path / "run", ("straggler",), ("straggler",), notes=((-1, "a"), (3, "b")))
    assert told["detectors off"] == "straggler"
    assert told["noted"] == "a (before the first step), b (behind step 3)"
    assert "detectors off" not in shown(tmp_path / "other", (), ())


def test_of_many_attempts_the_newest_are_named(tmp_path: Path) -> None:
    names = ("straggler", "coverage", "desync", "slowdown", "resume", "targets", "stuck_data",
             "grad_spike", "level_shift", "mode_flip")  # fmt: skip
    off = shown(tmp_path / "run", *((name,) for name in names))["detectors off"]
    assert off.startswith("attempt 9: mode_flip; attempt 8: level_shift; ")
    assert off.endswith(f"; {len(names) - MOST_SAID} more in earlier attempts")
