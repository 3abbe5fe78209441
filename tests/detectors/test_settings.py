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

    After them: nothing of it is a setting.
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


# Smallest whole numbers that are not 1; of a window that is the number of steps it must hold.
SMALLEST = {
    "reduction-recent": 3, "grad_altered-cut": 2, "loss_scale-warm_up": 0, "weight_jump-settle": 0,
    "update_ratio-window": 8, "output_jump-window": 8, "output_drop-window": 12,
    "grad_spike-window": 12, "grad_spike-least_steps": 0, "grad_spike-join_steps": 0,
    "dead_units-steps": 0, "grad_none_or_zero-steps": 0, "grad_zeros-window": 8,
    "vanishing-steps": 0, "loss_spike-window": 16, "loss_runaway-steps": 0, "level_shift-blocks": 2,
    "loss_runaway-settle": 0, "loss_runaway-lost_steps": 0, "rank_outlier-window": 8,
    "rank_outlier-settle": 0,
    "unsampled_spike-window": 8, "stuck_data-looks": 2, "stuck_data-beside": 2,
    "mode_flip-steps": 0, "collapse-looks": 2, "collapse-beside": 2,
}  # fmt: skip


@pytest.mark.parametrize(("detector", "name"), ALL, ids=[f"{d.name}-{n}" for d, n in ALL])
def test_every_setting_takes_the_smallest_that_makes_sense(
    detector: type[Detector], name: str
) -> None:
    whole = isinstance(defaults(detector)[name], int)
    other = 0 if name == "quiet_steps" else 1
    least = SMALLEST.get(f"{detector.name}-{name}", other) if whole else 1e-300
    detector(**{name: least})
    if least:
        with pytest.raises(ValueError, match=f"^{name}="):
            detector(**{name: least - 1 if whole else 0.0})
