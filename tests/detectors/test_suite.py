"""One first cause an episode, and verdicts in order of cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.loss_runaway import LossRunaway
from ddpprobe.detectors.suite import DETECTORS, Suite, default_suite, episodes, order_of_cause
from ddpprobe.records.step import Anomaly, FirstBad, StepRecord


def anomaly(detector: str, step: int, level: str = "page", **changes: object) -> Anomaly:
    base = Anomaly(
        detector, level, step, 0, None, None, None, "backward", False, "", {}, sampled=True
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Scripted(Detector):
    """Says what it was told to say, at the steps it was told."""

    name = "scripted"

    def __init__(self, *anomalies: tuple[int, Anomaly]) -> None:
        self._script = anomalies

    def update(self, record: StepRecord) -> list[Anomaly]:
        return [a for step, a in self._script if step == record.step]


def causes(*scripts: Scripted) -> list[tuple[str, int]]:
    suite = Suite(scripts)
    found = [a for s in range(1000) for a in suite.update(StepRecord(0, s, (0,), 0))]
    return [(a.detector, a.step) for a in [*found, *suite.finish()] if a.first_cause]


def nan(step: int) -> Scripted:
    return Scripted((step, anomaly("nonfinite", step)))


def spike(step: int, level: str = "page") -> Scripted:
    return Scripted((step, anomaly("grad_spike", step, level)))


def test_a_nonfinite_value_explains_the_spike_of_its_step() -> None:
    assert causes(nan(100), spike(100)) == [("nonfinite", 100)]


def test_a_page_within_eight_steps_before_a_nonfinite_value_is_its_cause() -> None:
    assert causes(nan(108), spike(100)) == [("grad_spike", 100)]
    assert causes(nan(109), spike(100)) == [("grad_spike", 100), ("nonfinite", 109)]


def test_a_warning_is_never_a_first_cause() -> None:
    assert causes(nan(101), spike(100, "warn")) == [("nonfinite", 101)]
    assert causes(spike(100, "warn")) == []


def ran_away(sign: Anomaly, since: int = 101, told: int = 116) -> list[tuple[str, str, bool]]:
    loss = anomaly("loss_runaway", told, "warn", message="the loss", values={"since": since})
    suite = Suite([Scripted((told - 1, sign)), Scripted((told, loss))])
    found = [a for s in range(120) for a in suite.update(StepRecord(0, s, (0,), 0))]
    return [(a.level, a.message, a.first_cause) for a in found if a.detector == "loss_runaway"]


@pytest.mark.parametrize("detector", sorted(LossRunaway.raised_after))
@pytest.mark.parametrize("step", [93, 101, 116])
def test_a_loss_that_runs_away_as_something_blows_up_is_a_page(detector: str, step: int) -> None:
    ((level, message, first),) = ran_away(anomaly(detector, step, "warn"))
    assert (level, first) == ("page", True)
    before = ": resume from before that one" if step < 101 else ""
    assert message.startswith(f"the loss; a page, as {detector} warned at step {step}{before}")
    assert (": resume from before that one" in message) == (step < 101)


@pytest.mark.parametrize(
    "sign",
    [
        anomaly("weight_jump", 92, "warn"),
        anomaly("weight_jump", 117, "warn"),
        anomaly("weight_jump", 101, "warn", attempt=1),
        anomaly("weight_jump", 101, "info"),
        anomaly("level_shift", 101, "warn"),
    ],
)
def test_a_loss_that_runs_away_by_itself_or_long_after_is_a_warning(sign: Anomaly) -> None:
    assert ran_away(sign) == [("warn", "the loss", False)]


def test_weights_that_jump_as_the_optimizer_is_built_anew_are_a_script_s() -> None:
    sign, rebuilt = (anomaly(name, 100, "warn") for name in ("weight_jump", "optimizer_reset"))
    loss = anomaly("loss_runaway", 116, "warn", values={"since": 101})
    for both, level in (((rebuilt, sign), "warn"), ((sign,), "page")):
        suite = Suite([Scripted(*((100, a) for a in both)), Scripted((116, loss))])
        found = [a for s in range(120) for a in suite.update(StepRecord(0, s, (0,), 0))]
        assert found[-1].level == level


def test_nothing_else_is_raised_by_what_blows_up() -> None:
    worse = anomaly("loss_runaway", 101, "warn", values={"first": 2.0})  # than at first
    other = anomaly("loss_spike", 101, "warn", values={"since": 101})
    sign = anomaly("weight_jump", 100, "warn")
    suite = Suite([Scripted((100, sign), (101, worse), (101, other))])
    found = [a for s in range(120) for a in suite.update(StepRecord(0, s, (0,), 0))]
    assert {a.level for a in found} == {"warn"}


def test_what_raises_a_detector_are_detectors() -> None:
    names = {detector.name for detector in DETECTORS}
    assert all(detector.raised_after <= names - {detector.name} for detector in DETECTORS)


def test_a_spike_within_a_hundred_steps_after_is_aftermath() -> None:
    assert causes(nan(100), spike(200)) == [("nonfinite", 100)]
    assert causes(nan(100), spike(201)) == [("nonfinite", 100), ("grad_spike", 201)]


def test_a_late_page_for_an_earlier_step_does_not_steal_the_cause() -> None:
    late = Scripted((106, anomaly("grad_spike", 100)))
    assert causes(nan(103), late) == [("nonfinite", 103)]


def test_a_first_cause_names_what_was_warned_of_before_it() -> None:
    loss = Scripted((110, anomaly("loss_spike", 106, "warn", rank=1)))
    old = Scripted((3, anomaly("batch_size", 3, "warn")))
    suite = Suite([nan(110), loss, old])
    (page,) = [
        a for s in range(120) for a in suite.update(StepRecord(0, s, (0,), 0)) if a.level == "page"
    ]
    assert page.message.endswith("; warned of before it: loss_spike at step 106 (rank 1)")


def test_a_first_cause_names_two_earlier_warnings_and_counts_the_others() -> None:
    warns = [Scripted((s, anomaly("grad_spike", s, "warn"))) for s in (95, 90, 99, 110)]
    suite = Suite([*warns, nan(100)])
    (page,) = [
        a for s in range(120) for a in suite.update(StepRecord(0, s, (0,), 0)) if a.level == "page"
    ]
    told = "; warned of before it: grad_spike at step 90, grad_spike at step 95 and 1 more"
    assert page.message.endswith(told)


def test_the_default_suite_finds_a_nan_and_keeps_quiet_without_one() -> None:
    suite = default_suite()
    clean = [StepRecord(0, s, (0, 1), s, scalars={0: {"loss": 1.0}}) for s in range(50)]
    assert [a for r in clean for a in suite.update(r)] == []
    bad = FirstBad(50, 0, "forward", 3, 1, "fc", "output", "", 1, 0, 0, 8)
    (page,) = suite.update(StepRecord(0, 50, (0, 1), 50, first_bad=bad))
    assert (page.detector, page.rank, page.module, page.first_cause) == ("nonfinite", 1, "fc", True)
    assert suite.finish() == []


def test_each_first_cause_is_followed_by_what_followed_from_it() -> None:
    info = anomaly("nonfinite", 3, "info")
    warn = anomaly("grad_spike", 405, "warn")
    aside = anomaly("grad_spike", 250, "warn")
    first = anomaly("nonfinite", 412, rank=5, first_cause=True)
    after = anomaly("grad_spike", 430)
    second = anomaly("nonfinite", 900, first_cause=True)
    order = order_of_cause([info, aside, warn, first, second, after])
    assert order == [first, after, warn, second, aside, info]
    assert [e.cause for e in episodes([info, first])] == [first, None]


def test_a_warning_raised_to_a_page_is_listed_once() -> None:
    warn = anomaly("grad_spike", 100, "warn")
    page = replace(warn, level="page", first_cause=True)
    assert order_of_cause([warn, page]) == [page]


def test_a_warning_of_something_else_is_listed_beside_a_page_of_its_step() -> None:
    page = replace(anomaly("desync", 100, first_cause=True), module="fc.weight", kind="param")
    warn = replace(anomaly("desync", 100, "warn"), module="positions", kind="buffer")
    assert order_of_cause([warn, page]) == [page, warn]


def test_the_order_does_not_depend_on_the_order_of_arrival() -> None:
    some = [anomaly("nonfinite", s, first_cause=True) for s in (5, 300)]
    some += [anomaly("grad_spike", s, "warn") for s in (7, 20, 310, 600)]
    assert order_of_cause(some) == order_of_cause(reversed(some))
