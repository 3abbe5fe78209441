"""What does not go on where the run was is told; what goes on, or is meant to differ, is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.resume import Resume
from ddpprobe.records.step import DIGEST, LEARNING_RATE, NOTED, Site, StepRecord
from tests.detectors.made_records import record, run

LAST, NEXT, EVERY = 200, 180, 5  # the first attempt's steps, the step of its checkpoint


def schedule(step: int) -> float:
    return 1e-2 if step < 100 else 1e-3


def fell(step: int) -> float:
    return 0.2 + float(np.exp(-step / 30))


def batch(step: int) -> float:
    return float(1000 + step)


def attempt(
    number: int, steps: range, *, rate: Callable[[int], float] = schedule,
    loss: Callable[[int], float] = fell, data: Callable[[int], float] = batch, ranks: int = 2,
    micro: float = 1.0, noise: float = 0.02,
) -> list[StepRecord]:  # fmt: skip
    """Sampled steps of an attempt; each rank has batches of its own."""
    rng = np.random.default_rng(number)
    return [
        record(
            step,
            {
                rank: {
                    LEARNING_RATE: rate(step), "micro_batches": micro,
                    "loss": loss(step) * float(np.exp(noise * rng.standard_normal())),
                    DIGEST: data(step) + rank / 8,
                }
                for rank in range(ranks)
            },
            attempt=number,
        )
        for step in steps
    ]  # fmt: skip


BEFORE = attempt(0, range(0, LAST, EVERY))
AFTER = range(NEXT, 300, EVERY)


def anew(of: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: of(step - NEXT)


def test_an_attempt_that_goes_on_is_left_alone() -> None:
    assert run(Resume(), BEFORE + attempt(1, AFTER)) == []
    later = range(LAST, 400, EVERY)
    assert run(Resume(), BEFORE + attempt(1, later)) == []
    assert run(Resume(), BEFORE + attempt(1, AFTER) + attempt(2, range(250, 400, EVERY))) == []


def test_a_loader_that_begins_anew_is_told_with_the_step_that_its_batches_are_of() -> None:
    (warn,) = run(Resume(), BEFORE + attempt(1, AFTER, data=anew(batch)))
    assert (warn.level, warn.step, warn.attempt, warn.rank) == ("warn", NEXT + EVERY, 1, None)
    assert "since step 180 are those of step 0 and on" in warn.message
    assert "the loader has begun anew, or at the wrong place; the data" in warn.message
    fresh = attempt(1, range(LAST, 300, EVERY), data=lambda step: batch(step - LAST))
    (undecided,) = run(Resume(), BEFORE + fresh)
    assert "maybe the loader has begun anew" in undecided.message
    assert "or an epoch ended here, and nobody shuffles" in undecided.message
    back = attempt(1, AFTER, data=lambda step: batch(step - 40))
    (other,) = run(Resume(), BEFORE + back)
    assert other.values["distance"] == 40


def test_batches_that_are_other_ones_on_a_rank_or_at_a_step_are_no_loader_that_begins_anew() -> (
    None
):
    mixed = attempt(1, AFTER, data=anew(batch))
    one = {**mixed[1].scalars, 1: {**mixed[1].scalars[1], DIGEST: 5.0}}
    assert run(Resume(), [*BEFORE, mixed[0], replace(mixed[1], scalars=one), *mixed[2:]]) == []
    assert run(Resume(), BEFORE + attempt(1, AFTER, data=lambda _: batch(0))) == []


def test_epochs_that_nobody_shuffles_may_begin_again_where_one_ends() -> None:
    def turns(step: int) -> float:
        return batch(step % 60)

    first = attempt(0, range(0, LAST, EVERY), data=turns)
    assert run(Resume(), first + attempt(1, AFTER, data=turns)) == []
    assert run(Resume(), first + attempt(1, range(LAST, 300, EVERY), data=turns)) == []
    (warn,) = run(
        Resume(), first + attempt(1, range(200, 300, EVERY), data=lambda s: turns(s - 200))
    )
    assert warn.values["distance"] % 60 != 0


def test_one_batch_for_all_steps_is_not_the_loader_s() -> None:
    first = attempt(0, range(0, LAST, EVERY), data=lambda _: 7.0)
    assert run(Resume(), first + attempt(1, AFTER, data=lambda _: 7.0)) == []


def test_a_schedule_that_begins_anew_is_told_and_another_rate_is_not() -> None:
    (warn,) = run(Resume(), BEFORE + attempt(1, AFTER, rate=anew(schedule)))
    assert (
        "the learning rate is 0.01 since step 180, as in the first steps of the run, and was"
        in (warn.message)
    )
    assert warn.values == {"rate": 1e-2, "before": 1e-3}
    for chosen in (1e-4, 5e-3):
        assert run(Resume(), BEFORE + attempt(1, AFTER, rate=lambda _, x=chosen: x)) == []


def test_a_rise_that_begins_anew_is_told() -> None:
    def rises(step: int) -> float:
        return min(1e-2, 1e-4 * (step + 1))

    first = attempt(0, range(0, LAST, EVERY), rate=rises)
    (warn,) = run(Resume(), first + attempt(1, AFTER, rate=anew(rises)))
    assert warn.values == {"rate": 1e-4, "before": 1e-2}
    assert run(Resume(), first + attempt(1, AFTER, rate=rises)) == []


def test_a_resume_between_two_sampled_steps_begins_the_schedule_anew_at_neither() -> None:
    def rises(step: int) -> float:
        return min(1e-2, 1e-3 * (step + 1))

    first = attempt(0, range(0, LAST, EVERY), rate=rises)
    later = attempt(1, AFTER, rate=lambda step: rises(step - NEXT + 3))
    (warn,) = run(Resume(), first + later)
    assert warn.values == {"rate": 4e-3, "before": 1e-2}
    assert "the schedule has begun anew" in warn.message
    lower = attempt(1, AFTER, rate=lambda _: 4e-3)  # which the rise has left by the next look
    assert run(Resume(), first + lower) == []
    steep = attempt(0, range(0, LAST, EVERY), rate=lambda step: 1e-2 if step else 1e-5)
    assert run(Resume(), steep + lower) == []


def test_weights_that_were_not_loaded_are_told_by_the_loss() -> None:
    (warn,) = run(Resume(), BEFORE + attempt(1, AFTER, loss=anew(fell)))
    assert "maybe the weights were not loaded" in warn.message
    (part,) = run(Resume(), BEFORE + attempt(1, AFTER, loss=lambda step: fell(step) + 0.2))
    assert "maybe not all that it needs was loaded" in part.message


def test_a_loss_within_what_it_was_or_for_one_step_is_left_alone() -> None:
    noisy = attempt(0, range(0, LAST, EVERY), noise=0.3)
    assert run(Resume(), noisy + attempt(1, AFTER, noise=0.3)) == []
    once = attempt(1, AFTER, loss=lambda step: 9.0 if step == NEXT else fell(step))
    assert run(Resume(), BEFORE + once) == []
    few = attempt(0, range(180 - 8 * EVERY, 180, EVERY))  # of which the later half is four
    assert run(Resume(), few + attempt(1, AFTER, loss=anew(fell))) == []


def test_a_loss_that_is_infinite_both_ways_is_no_loss_to_compare() -> None:
    """Neither in the attempt before nor in the one that resumes: the mean is no number."""

    def torn(of: list[StepRecord]) -> list[StepRecord]:
        said = {rank: {**of[1].scalars[rank], "loss": s} for rank, s in ((0, np.inf), (1, -np.inf))}
        micro = {rank: {**one, "micro_batches": one["loss"]} for rank, one in said.items()}
        return [of[0], replace(of[1], scalars=micro), *of[2:]]

    assert run(Resume(), torn(BEFORE) + torn(attempt(1, AFTER))) == []


@pytest.mark.parametrize(("ranks", "micro"), [(4, 1.0), (2, 4.0), (1, 1.0)])
def test_another_number_of_micro_batches_is_information(ranks: int, micro: float) -> None:
    (info,) = run(Resume(), BEFORE + attempt(1, AFTER, ranks=ranks, micro=micro))
    assert (info.level, info.values) == ("info", {"micro_batches": ranks * micro, "before": 2.0})
    assert run(Resume(), BEFORE + attempt(1, AFTER, ranks=1, micro=2.0)) == []


def test_what_is_announced_is_meant() -> None:
    after = attempt(1, AFTER, data=anew(batch), rate=anew(schedule), loss=anew(fell), micro=3.0)
    assert len(run(Resume(), BEFORE + after)) == 4
    first = {rank: {**said, NOTED: 1.0} for rank, said in after[0].scalars.items()}
    assert run(Resume(), [*BEFORE, replace(after[0], scalars=first), *after[1:]]) == []


def test_an_attempt_from_scratch_is_no_resume() -> None:
    assert run(Resume(), BEFORE + attempt(1, range(0, 300, EVERY))) == []
    assert run(Resume(), attempt(1, range(NEXT, 300, EVERY))) == []


def test_what_is_kept_of_long_attempts_is_bounded_and_holds_their_first_and_last_steps() -> None:
    long = attempt(0, range(5000), noise=0.0)
    detector = Resume()
    after = attempt(1, range(5000, 5010), data=lambda step: batch(step - 5000))
    found = run(detector, long + after)
    assert [a.values.get("distance") for a in found] == [5000.0]
    assert len(detector._before) <= 256


WEIGHTS = {"a.weight": 4096, "b.weight": 4096, "b.bias": 32}


class Trained:
    """Weights that each step moves by a little, as an optimizer does."""

    def __init__(self, seed: int = 0, step: float = 1e-3) -> None:
        self.rng, self.step = np.random.default_rng(seed), step
        self.held = {name: self.rng.standard_normal(n) for name, n in WEIGHTS.items()}

    def train(self) -> None:
        for name, held in self.held.items():
            self.held[name] = held + self.step * self.rng.standard_normal(len(held))

    def record(self, step: int, number: int, turn: int = 1, **more: object) -> StepRecord:
        rows = {
            Site(name, "param"): {
                "numel": len(x), "sum": x.sum(), "sum_sq": (x**2).sum(), "min": x.min(),
                "max": x.max(),
            }
            for i, (name, x) in enumerate(self.held.items()) if i % turn == step // EVERY % turn
        }  # fmt: skip
        return record(step, {0: {"loss": fell(step)}}, rows, attempt=number, **more)


def looks(
    trained: Trained, steps: range, number: int, every: int = EVERY, turn: int = 1
) -> list[StepRecord]:
    """The records of sampled steps of an attempt, with what the weights are behind each."""
    found = []
    for step in steps:
        trained.train()
        if step % every == 0:
            found.append(trained.record(step, number, turn))
    return found


def resumes(
    change: Callable[[Trained], None], *, every: int = EVERY, turn: int = 1, until: int = LAST
) -> list[StepRecord]:
    """Two attempts; the second goes on from a checkpoint of step `NEXT`, which `change` alters."""
    one = Trained()
    before = looks(one, range(NEXT), 0, every, turn)
    other = copy.deepcopy(one)
    before += looks(one, range(NEXT, until), 0, every, turn)
    change(other)
    other.rng = np.random.default_rng(7)
    return before + looks(other, range(NEXT, 300), 1, every, turn)


def anew_in(*names: str) -> Callable[[Trained], None]:
    fresh = Trained(seed=1).held
    return lambda trained: trained.held.update({name: fresh[name].copy() for name in names})


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize("until", [NEXT, LAST])
def test_a_weight_that_begins_anew_behind_a_resume_is_named_once(every: int, until: int) -> None:
    (warn,) = run(Resume(), resumes(anew_in("b.weight"), every=every, until=until))
    assert (warn.level, warn.attempt, warn.step) == ("warn", 1, NEXT)
    assert (warn.module, warn.kind) == ("b.weight", "param")
    assert (warn.values["parameters"], warn.values["compared"]) == (1, 2)
    assert "the weights of b.weight are not those that the run had at step " in warn.message


def test_a_weight_that_never_moved_is_told_without_a_ratio() -> None:
    """A bias of zeros that the optimizer leaves alone is another one, and stays so."""
    zeros, ones = np.zeros(WEIGHTS["b.weight"]), np.ones(WEIGHTS["b.weight"])

    def fixed(to: np.ndarray, steps: range, number: int) -> list[StepRecord]:
        one, found = Trained(), []
        for step in steps:
            one.train()
            one.held["b.weight"] = to
            found += [one.record(step, number)] if step % EVERY == 0 else []
        return found

    found = run(Resume(), fixed(zeros, range(LAST), 0) + fixed(ones, AFTER, 1))
    (warn,) = [each for each in found if each.module == "b.weight"]
    assert "it had never moved from look to look. Maybe" in warn.message
    assert "times" not in warn.values


def test_another_checkpoint_shows_at_all_weights() -> None:
    (warn,) = run(Resume(), resumes(anew_in("a.weight", "b.weight")))
    assert (warn.values["parameters"], warn.module) == (2, "a.weight")


def test_weights_that_take_turns_are_compared_as_they_come() -> None:
    found = run(Resume(), resumes(anew_in("a.weight", "b.weight"), turn=3))
    assert [a.module for a in found] == ["a.weight"]


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize("until", [NEXT, LAST])
@pytest.mark.parametrize("turn", [1, 3])
def test_weights_that_go_on_from_a_checkpoint_are_left_alone(
    every: int, until: int, turn: int
) -> None:
    assert run(Resume(), resumes(lambda _: None, every=every, until=until, turn=turn)) == []


def test_weights_that_move_twice_as_far_behind_a_resume_are_left_alone() -> None:
    def faster(trained: Trained) -> None:
        trained.step *= 2

    assert run(Resume(), resumes(faster)) == []


def test_weights_that_a_higher_learning_rate_moves_further_are_left_alone() -> None:
    def faster(trained: Trained) -> None:
        trained.step *= 300
        trained.train()
        trained.step /= 300

    stream = resumes(faster, every=1)
    assert run(Resume(), stream) != []
    rated = [
        replace(r, scalars={0: {**r.scalars[0], LEARNING_RATE: 3e-2 if r.attempt else 1e-4}})
        for r in stream
    ]
    assert run(Resume(), rated) == []


def test_the_norm_alone_tells_a_weight_whose_other_numbers_are_alike() -> None:
    def smaller(trained: Trained) -> None:
        held = trained.held["b.weight"]
        inner = np.abs(held) < np.abs(held).max() / 2
        trained.held["b.weight"] = np.where(inner, held * 0.8, held)

    (warn,) = run(Resume(), resumes(smaller, every=1))
    assert warn.module == "b.weight"


def test_few_numbers_another_shape_and_what_is_announced_are_not_judged() -> None:
    assert run(Resume(), resumes(anew_in("b.bias"))) == []

    def wider(trained: Trained) -> None:
        trained.held["b.weight"] = np.ones(8192)

    assert run(Resume(), resumes(wider)) == []
    stream = resumes(anew_in("b.weight"))
    first = next(i for i, r in enumerate(stream) if r.attempt == 1)
    noted = replace(stream[first], scalars={0: {**stream[first].scalars[0], NOTED: 1.0}})
    assert run(Resume(), [*stream[:first], noted, *stream[first + 1 :]]) == []


def test_two_looks_before_are_too_few_to_know_how_far_a_weight_moves() -> None:
    stream = resumes(anew_in("b.weight"), until=NEXT)
    before, after = stream[: NEXT // EVERY], stream[NEXT // EVERY :]
    assert run(Resume(), before[-2:] + after) == []
    assert len(run(Resume(), before[-3:] + after)) == 1


@pytest.mark.parametrize("until", [4 * EVERY, LAST])
def test_an_attempt_from_scratch_begins_with_weights_of_its_own(until: int) -> None:
    again = looks(Trained(seed=1), range(100), 1)
    assert run(Resume(), looks(Trained(), range(until), 0) + again) == []


@pytest.mark.parametrize("bits", [7, 10])
def test_a_checkpoint_in_half_precision_rounds_weights_and_is_left_alone(bits: int) -> None:
    def rounded(trained: Trained) -> None:
        trained.step = 0.0
        for name, held in trained.held.items():
            spacing = 2.0 ** (np.floor(np.log2(np.abs(held))) - bits)
            trained.held[name] = np.round(held / spacing) * spacing

    one = Trained(step=1e-6)
    before = looks(one, range(NEXT), 0, 1)
    rounded(one)
    assert run(Resume(), before + looks(one, range(NEXT, 300), 1, 1)) == []


def test_a_look_that_lacks_a_shard_is_not_compared() -> None:
    stream = resumes(lambda _: None, every=1)
    first = next(i for i, r in enumerate(stream) if r.attempt == 1)
    half = Trained()
    half.held = {name: x / 2 for name, x in half.held.items()}
    torn = [half.record(NEXT + i, 1, missing=(1,)) for i in range(3)]
    assert run(Resume(), [*stream[:first], *torn, *stream[first + 3 :]]) == []
    whole = [half.record(NEXT + i, 1) for i in range(3)]
    assert len(run(Resume(), [*stream[:first], *whole, *stream[first + 3 :]])) == 1


def test_how_far_is_too_far_is_a_setting() -> None:
    assert run(Resume(moved=1e6), resumes(anew_in("b.weight"))) == []
