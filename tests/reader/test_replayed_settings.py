"""`Run.replayed` refuses settings that there are not, as `ddpprobe replay` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpprobe.errors import RunError
from ddpprobe.reader.run import open_run

from ..made_runs import Made


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nope": {"z": 3}}, "nope"),
        ({"grad_spike": {"zz": 3}}, "grad_spike has no setting 'zz'; it has z="),
        ({"grad_spike": {"z": "a"}}, "z=a: expected a number"),
        ({"grad_spike": 3}, "must be True, False or settings, got 3"),
        (5, "detectors must be a mapping such as"),
    ],
)
def test_settings_that_there_are_not_are_refused(
    tmp_path: Path, settings: object, says: str
) -> None:
    run = open_run(Made(tmp_path / "run").whole(10).close().path)
    with pytest.raises(RunError, match=says):
        run.replayed(settings)  # type: ignore[arg-type]


def test_a_detector_can_be_left_out(tmp_path: Path) -> None:
    run = open_run(Made(tmp_path / "run").whole(10).close().path)
    assert run.replayed({"nonfinite": False, "grad_spike": {"z": 4}}) == run.replayed()
