"""A gradient that no sample saw is told from the second moment; what samples saw is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.detectors.unsampled_spike import UnsampledSpike
from ddpprobe.records.step import MOMENT_DECAY, Site, StepRecord
from tests.detectors.made_records import levels, record, run

DECAY = 0.999


class Adam:
    """Parameters of one element, stepped by given gradients: what it keeps of their squares."""

    def __init__(
        self, names: Sequence[str] = ("w",), *, every: int = 10, decay: float = DECAY,
        dtype: str = "float32", leaf: str = "exp_avg_sq",
    ) -> None:  # fmt: skip
        self.names, self.every, self.decay, self.dtype = names, every, decay, dtype
        self.moments = np.zeros(len(names))
        self.leaf = leaf

    def steps(self, gradients: np.ndarray, first: int = 0, **more: object) -> list[StepRecord]:
        """Take a step for each row of gradients [steps, parameters]; the sampled ones."""
        records = []
        for number, g in enumerate(gradients, first):
            self.moments = self.decay * self.moments + (1 - self.decay) * np.square(g)
            if number % self.every == 0:
                records.append(self._record(number, g, **more))
        return records

    def _record(self, number: int, gradient: np.ndarray, **more: object) -> StepRecord:
        rows = {}
        for name, g, v in zip(self.names, np.abs(gradient), self.moments, strict=True):
            rows[Site(name, "grad", placement="replicated")] = {"sum_sq": g * g, "max": g}
            site = Site(name, "optim_state", self.leaf, "replicated", dtype=self.dtype)
            rows[site] = {"sum": v, "max": v}
        return record(number, {0: {MOMENT_DECAY: self.decay}}, rows=rows, **more)


def usual(steps: int = 300, parameters: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, 0.3, (steps, parameters))


@pytest.mark.parametrize(("decay", "leaf"), [(0.999, "exp_avg_sq"), (0.95, "exp_avg_sq"),
                                             (0.99, "square_avg")])  # fmt: skip
def test_a_spike_between_two_samples_is_told_at_the_next_with_its_size(
    decay: float, leaf: str
) -> None:
    gradients = usual()
    gradients[155] = 100.0
    (warn,) = run(UnsampledSpike(), Adam(decay=decay, leaf=leaf).steps(gradients))
    assert (warn.level, warn.step, warn.module, warn.kind) == ("warn", 160, "w", "optim_state")
    assert warn.values["norm"] == pytest.approx(100.0 * decay**2.5, rel=0.01)
    assert warn.values["highest"] == pytest.approx(np.abs(gradients[:161:10]).max())
    assert warn.values["parameters"] == 1
    assert "between steps 150 and 160" in warn.message


@pytest.mark.parametrize(("decay", "every"), [(0.9, 10), (0.9, 60), (0.99, 200), (0.999, 200)])
@pytest.mark.parametrize("back", [1, 9])
def test_the_norm_is_the_least_that_one_gradient_alone_can_have_had(
    decay: float, every: int, back: int
) -> None:
    gradients = usual(16 * every)
    gradients[15 * every - back] = 1000.0
    (warn,) = run(UnsampledSpike(), Adam(every=every, decay=decay).steps(gradients))
    assert warn.step == 15 * every
    # What is left of a square decays from its step to the look, and nobody knows which step it was.
    assert warn.values["norm"] == pytest.approx(1000.0 * decay ** (back / 2), rel=0.001)
    assert f"of norm {warn.values['norm']:.3g} or more" in warn.message


@given(st.integers(0, 1000), st.sampled_from([1, 3, 10]))
def test_usual_gradients_say_nothing_at_any_interval(seed: int, every: int) -> None:
    assert run(UnsampledSpike(), Adam("abc", every=every).steps(usual(400, 3, seed))) == []


def test_a_spike_that_was_sampled_is_no_secret() -> None:
    gradients = usual()
    gradients[160] = 100.0
    assert run(UnsampledSpike(), Adam().steps(gradients)) == []
    gradients[155] = 100.0  # nor one that is no larger than what a sample had seen
    assert run(UnsampledSpike(), Adam().steps(gradients)) == []


def test_gradients_that_are_always_larger_between_samples_are_how_the_run_is() -> None:
    gradients = usual()
    gradients[5::10] *= 100.0  # another loss, at other steps
    assert run(UnsampledSpike(), Adam().steps(gradients)) == []


def test_several_parameters_are_told_as_one_gradient_of_what_they_have_in_common() -> None:
    names = ("body.0.weight", "body.1.weight", "head.weight")
    gradients = usual(parameters=3)
    gradients[155, :2] = 100.0
    (warn,) = run(UnsampledSpike(), Adam(names).steps(gradients))
    assert (warn.module, warn.values["parameters"]) == ("body", 2)
    assert warn.values["norm"] == pytest.approx(100 * np.sqrt(2), rel=0.03)
    gradients[155] = 100.0
    (warn,) = run(UnsampledSpike(), Adam(names).steps(gradients))
    assert (warn.module, warn.values["parameters"]) == (None, 3)
    assert "3 parameters" in warn.message


def test_a_gradient_that_is_rounding_alone_is_not_judged() -> None:
    gradients = usual(parameters=2)
    gradients[:, 0] *= 1e-7  # the bias of keys
    gradients[155, 0] = 1e-5
    assert run(UnsampledSpike(), Adam(("k.bias", "w")).steps(gradients)) == []


def test_a_coarse_state_another_decay_and_one_that_is_not_known_are_not_judged() -> None:
    gradients = usual()
    gradients[155] = 100.0
    assert run(UnsampledSpike(), Adam(dtype="bfloat16").steps(gradients)) == []
    stream = Adam().steps(gradients)
    without = [record(r.step, {0: {}}, rows=_rows(r)) for r in stream]
    assert run(UnsampledSpike(), without) == []
    changed = [
        record(r.step, {0: {MOMENT_DECAY: 0.999 if r.step < 160 else 0.99}}, rows=_rows(r))
        for r in stream
    ]
    assert run(UnsampledSpike(), changed) == []
    differ = [record(r.step, {0: {MOMENT_DECAY: 0.9}, 1: {MOMENT_DECAY: 0.99}}, rows=_rows(r))
              for r in stream]  # fmt: skip
    assert run(UnsampledSpike(), differ) == []


def test_a_look_that_lacks_ranks_is_not_judged_and_the_next_one_is() -> None:
    gradients = usual()
    gradients[165] = 100.0
    stream = Adam().steps(gradients)
    torn = [record(r.step, dict(r.scalars), rows=_rows(r), missing=(1,)) if r.step == 160 else r
            for r in stream]  # fmt: skip
    assert levels(run(UnsampledSpike(), torn)) == [("warn", 170)]


def test_four_looks_and_eight_sampled_gradients_must_come_before() -> None:
    for at, told in ((65, []), (75, [("warn", 80)])):
        gradients = usual()
        gradients[at] = 100.0
        assert levels(run(UnsampledSpike(looks=1), Adam().steps(gradients))) == told
    for at, told in ((55, []), (65, [("warn", 70)])):
        gradients = usual()
        gradients[at] = 100.0
        assert levels(run(UnsampledSpike(least=4), Adam().steps(gradients))) == told


def test_a_parameter_that_takes_its_turn_is_judged_from_look_to_look() -> None:
    gradients = usual(900)
    gradients[655] = 100.0
    stream = [
        r if r.step % 60 == 0 else record(r.step, dict(r.scalars), rows=_rows(r, "grad"))
        for r in Adam().steps(gradients)
    ]
    (warn,) = run(UnsampledSpike(), stream)
    assert warn.step == 660
    assert "between steps 600 and 660" in warn.message


def test_a_new_attempt_begins_anew() -> None:
    gradients = usual()
    gradients[155] = 100.0
    adam = Adam()
    first, second = adam.steps(gradients[:151]), adam.steps(gradients[151:], 151, attempt=1)
    assert run(UnsampledSpike(), first + second) == []


def test_it_is_told_again_after_a_hundred_quiet_steps() -> None:
    gradients = usual(600)
    for at in (155, 185, 405):
        gradients[at] = 1000.0 * at
    told = levels(run(UnsampledSpike(worse=1.0), Adam().steps(gradients)))
    assert told == [("warn", 160), ("warn", 410)]


def _rows(r: StepRecord, *kinds: str) -> dict[Site, dict[str, float]]:
    """Return the rows of a record, all or those of some kinds, to be made anew."""
    names = ("min", "max", "sum", "sum_sq")
    return {
        site: dict(zip(names, r.values[i].tolist(), strict=True))
        for i, site in enumerate(r.sites)
        if not kinds or site.kind in kinds
    }


def test_a_look_that_lacks_a_rank_is_no_look() -> None:
    stream = Adam(every=1).steps(usual(1600))
    lost = stream[1500]  # its sum is that of one rank of two
    rows = {
        site: {"sum": row["sum"] / 2, "max": row["max"]} if site.kind == "optim_state" else row
        for site, row in _rows(lost).items()
    }
    stream[1500] = record(lost.step, dict(lost.scalars), rows=rows, missing=(1,))
    assert run(UnsampledSpike(), stream) == []


def test_a_moment_that_was_left_as_it_was_is_no_gradient() -> None:
    """As a scaler's skip leaves it, or a parameter without a gradient, when gradients fall."""
    adam = Adam(every=1)
    falling = adam.steps(np.exp(-np.arange(300.0) / 60)[:, None])
    resting = []
    for number in range(300, 400):
        rows = _rows(falling[-1], "optim_state")
        resting.append(record(number, {0: {MOMENT_DECAY: DECAY}}, rows=rows))
    assert run(UnsampledSpike(), falling + resting) == []
