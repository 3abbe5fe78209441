"""What a detector's class says of itself is what a user reads."""

from __future__ import annotations

import math

import pytest

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.settings import above_zero, at_least, defaults, meanings, summary
from ddpprobe.detectors.suite import DETECTORS, read_settings
from ddpprobe.records.step import Anomaly, StepRecord


class Told(Detector):
    """Says what it is told,
    on two lines.

    More of it.

    Args:
        one, two: what both are,
            at length: it goes on.
        three: the last.

    Behind them: nothing of it is a setting.
    """

    name, title = "told", "Told"

    def __init__(self, *, one: int = 1, two: int = 2, three: float = 3.0) -> None:
        self.settings = one, two, three

    def update(self, record: StepRecord) -> list[Anomaly]:
        return [self.anomaly(record, "page", "said", {}, step=record.step - 1)]


def test_the_docstring_says_what_it_does_and_what_each_setting_means() -> None:
    assert summary(Told) == "Says what it is told, on two lines"
    both = "what both are, at length: it goes on"
    assert meanings(Told) == {"one": both, "two": both, "three": "the last"}


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.name)
def test_every_setting_of_every_detector_is_explained(detector: type[Detector]) -> None:
    assert list(meanings(detector)) == list(defaults(detector))
    assert all(meanings(detector).values())
    assert summary(detector)
    assert detector.title


ALL = [(detector, name) for detector in DETECTORS for name in defaults(detector)]


@pytest.mark.parametrize(("detector", "name"), ALL, ids=[f"{d.name}-{n}" for d, n in ALL])
def test_every_setting_refuses_what_makes_no_sense_by_its_name(
    detector: type[Detector], name: str
) -> None:
    for wrong in (-1, math.inf):
        with pytest.raises(ValueError, match=f"^{name}={wrong}: expected a number "):
            detector(**{name: wrong})


def test_zero_is_not_above_zero_and_is_at_least_zero() -> None:
    above_zero(ratio=1e-300)
    at_least(0, steps=0)
    for refused in (lambda: above_zero(ratio=0.0), lambda: at_least(1, steps=0)):
        with pytest.raises(ValueError, match="expected a number "):
            refused()


def test_a_verdict_on_an_earlier_step_is_not_of_the_sampled_one() -> None:
    (page,) = Told().update(StepRecord(2, 7, (0,), 5, sampled=True))
    assert (page.detector, page.step, page.sampled, page.first_cause) == ("told", 6, False, True)
    assert (page.attempt, page.wall_time_ns) == (2, 5)


def test_settings_of_several_detectors_are_kept_apart() -> None:
    given = [("desync", "quiet_steps=7"), ("nonfinite", "quiet_steps=9"), ("coverage", None)]
    found = read_settings(given)
    assert found == {"desync": {"quiet_steps": 7}, "nonfinite": {"quiet_steps": 9}}


def test_a_typed_setting_is_an_assignment_to_a_detector_that_there_is() -> None:
    with pytest.raises(ValueError, match=r"^'z': expected key=value, such as quiet_steps=20$"):
        read_settings([("desync", "z")])
    with pytest.raises(ValueError, match="no detector 'grad': choose one of grad_spike, "):
        read_settings([("grad", None)])
    with pytest.raises(ValueError, match="desync has no setting 'z'; it has quiet_steps"):
        read_settings([("desync", "z=1")])
