"""Passes of several models have one order, in which what was bad first can be told."""

from __future__ import annotations

import os
import re

import pytest

from ddpprobe.rank.passes import OF_THE_PROCESS, PassCount, Passes
from ddpprobe.records.step import LENT, PASS, PASS_OF_BAD, FirstBad


def bad(phase: str, micro: int = 0, step: int = 0) -> FirstBad:
    return FirstBad(step, micro, phase, 0, 0)


def models(number: int) -> tuple[Passes, ...]:
    count = PassCount()
    made = tuple(Passes(count) for _ in range(number))
    for one in made:
        one.begin()
    return made


def number(of: Passes, step: int, what: FirstBad) -> float | None:
    return of.told(step, what).get(PASS_OF_BAD)


def test_a_lone_model_is_told_nothing_of_passes_but_what_was_lent() -> None:
    (one,) = models(1)
    one.forward()
    one.backward(0)
    assert one.told(0, bad("forward")) == {}
    one.lend(1)
    one.end_step(0)
    assert one.told(0, bad("forward")) == {LENT: 1.0}


def test_passes_are_in_the_order_of_the_loop() -> None:
    g, d = models(2)
    g.forward()
    d.forward()
    d.backward(0)
    g.backward(0)
    for one in (d, g):
        one.backward_over()
    g.end_step(0)
    d.forward()
    order = [
        number(g, 0, bad("forward")), number(d, 0, bad("forward")), number(d, 0, bad("backward")),
        number(g, 0, bad("backward")), number(g, 0, bad("step")),
        number(d, 0, bad("forward", micro=1)),
    ]  # fmt: skip
    assert None not in order
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    # One backward came to both: there is no pass between its two numbers.
    assert [int(pass_) for pass_ in order] == [1, 2, 3, 3, 3, 4]
    assert g.told(0, None) == {PASS: float(int(order[3]))}


def test_a_backward_has_a_whole_number_where_it_comes_in_and_each_other_model_a_share_more() -> (
    None
):
    count = PassCount()
    assert count.forward() == 1.0
    assert (count.backward(), count.backward()) == (2.0, 2.0 + 2**-10)
    count.backward_over()
    assert count.backward() == 3.0
    assert PassCount().backward() == 1.0  # of a model that was called before it was probed


def test_two_backwards_of_one_turn_have_numbers_of_their_own() -> None:
    a, c = models(2)
    for one in (a, c):
        one.forward()
    a.backward(0)
    a.backward_over()
    c.backward(0)
    assert int(number(a, 0, bad("backward"))) < int(number(c, 0, bad("backward")))


def test_a_backward_that_raised_is_over_where_the_next_forward_begins() -> None:
    a, c = models(2)
    a.forward()
    c.forward()
    a.backward(0)
    c.forward()
    c.backward(1)
    first, then = number(a, 0, bad("backward")), number(c, 0, bad("backward", micro=1))
    assert int(first) < int(then)


@pytest.mark.parametrize(
    ("backwards", "micro", "found"),
    [
        ([1], 0, True),  # one backward through both forwards
        ([0, 1], 0, True),
        ([0, 1], 1, True),
        ([1, 1], 0, False),  # two of them, after both forwards
        ([1, 1], 1, False),
        ([], 0, False),
    ],
)
def test_the_backward_of_a_micro_batch_is_told_where_it_is_known(
    backwards: list[int], micro: int, found: bool
) -> None:
    one, _ = models(2)
    one.forward()
    one.forward()
    for at in backwards:
        one.backward(at)
        one.backward_over()
    assert (number(one, 0, bad("backward", micro)) is not None) == found


def test_of_steps_that_are_long_over_nothing_is_known() -> None:
    one, _ = models(2)
    for step in range(100):
        one.forward()
        one.end_step(step)
    known = [step for step in range(100) if number(one, 99, bad("forward", step=step)) is not None]
    assert known == list(range(36, 100))
    assert number(one, 100, bad("step", step=100)) is None  # it is not over


def test_a_model_that_was_not_always_alone_goes_on_counting() -> None:
    one, other = models(2)
    one.forward()
    other.close()
    one.end_step(0)
    assert PASS in one.told(0, None)


def test_a_model_is_alone_when_all_others_have_closed_and_not_behind_the_next() -> None:
    one, other = models(2)
    for each in (one, other):
        each.close()
    alone, second = (Passes(one._count) for _ in range(2))
    alone.begin()
    alone.forward()
    assert alone.told(0, None) == {}
    second.begin()
    second.forward()
    assert PASS in second.told(0, None)


def test_of_a_step_of_very_many_passes_only_the_first_are_known() -> None:
    one, _ = models(2)
    for micro in range(1030):
        one.forward()
        one.backward(micro)
        one.backward_over()
    for phase in ("forward", "backward"):
        known = [m for m in range(1030) if number(one, 0, bad(phase, m)) is not None]
        assert known == list(range(1024))


def test_of_a_micro_batch_that_has_not_been_nothing_is_known() -> None:
    one, _ = models(2)
    one.forward()
    assert number(one, 0, bad("forward", micro=1)) is None
    assert number(one, 0, bad("forward", micro=-1)) is None


def test_a_forked_child_is_a_process_of_its_own() -> None:
    token = OF_THE_PROCESS.token
    assert re.fullmatch("[0-9a-f]{16}", PassCount().token)
    assert PassCount().token != token
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, OF_THE_PROCESS.token.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() not in {token, ""}
    os.waitpid(child, 0)
    assert OF_THE_PROCESS.token == token
