"""Ranks that run on other software than most are named, once an attempt."""

from __future__ import annotations

from collections.abc import Iterable

from ddpprobe.detectors.environment import Environment
from ddpprobe.records.environment import SCALAR
from ddpprobe.records.step import NOTED, StepRecord
from tests.detectors.made_records import record, run

LIBRARY = f"{SCALAR}numpy"


def step(number: int, numbers: dict[int, float], name: str = LIBRARY, **more) -> StepRecord:
    return record(number, {rank: {"loss": 1.0, name: x} for rank, x in numbers.items()}, **more)


def rest(steps: Iterable[int], **more: int) -> list[StepRecord]:
    return [record(s, {rank: {"loss": 1.0} for rank in range(3)}, **more) for s in steps]


def test_the_one_that_differs_from_most_is_named_once() -> None:
    (warn,) = run(Environment(), [step(0, {0: 0, 1: 1, 2: 0}), *rest(range(1, 50))])
    assert (warn.level, warn.step, warn.rank) == ("warn", 0, 1)
    assert warn.message.startswith("rank 1 differs from ranks 0, 2 in what they run on: numpy; ")
    assert warn.values == {"differences": 1, "ranks": 1}


def test_of_two_ranks_none_is_to_blame() -> None:
    (warn,) = run(Environment(), [step(0, {0: 0, 1: 1})])
    assert warn.rank is None
    assert warn.message.startswith("rank 1 differs from rank 0 in")


def test_several_are_listed() -> None:
    (warn,) = run(Environment(), [step(0, {0: 0, 1: 1, 2: 2, 3: 0})])
    assert warn.rank is None
    assert warn.message.startswith("ranks 1-2 differ from ranks 0, 3 in")


def test_ranks_of_which_each_is_another_in_something_are_named_together() -> None:
    names = [f"{SCALAR}{name}" for name in ("numpy", "torch")]
    told = {0: {names[0]: 0.0, names[1]: 1.0}, 1: {names[0]: 1.0, names[1]: 0.0}}
    (warn,) = run(Environment(), [record(0, told)])
    assert warn.rank is None
    assert warn.message.startswith("ranks 0-1 differ in what they run on: numpy, torch; ")


def test_of_many_names_the_first_are_said() -> None:
    names = [f"{SCALAR}code/{name}.py" for name in "abcdef"]
    scalars = {rank: dict.fromkeys(names, float(rank)) for rank in range(2)}
    (warn,) = run(Environment(), [record(0, scalars)])
    assert "code/a.py, code/b.py, code/c.py, code/d.py and 2 more; " in warn.message


def test_another_gpu_alone_is_information() -> None:
    (said,) = run(Environment(), [step(0, {0: 0, 1: 0, 2: 1}, f"{SCALAR}gpu")])
    assert (said.level, said.rank) == ("info", 2)


def test_each_attempt_is_told_of_and_a_note_is_nothing_to_it() -> None:
    first, second = step(0, {0: 0, 1: 1, 2: 0}), step(20, {0: 0, 1: 1, 2: 0}, attempt=1)
    noted = record(5, {0: {NOTED: 1.0}})
    found = run(Environment(), [first, noted, *rest(range(6, 20)), second])
    assert [a.step for a in found] == [0, 20]


def test_ranks_that_come_late_are_waited_for_and_not_for_ever() -> None:
    late = step(10, {2: 1.0, 1: 0.0})
    lacks = [record(s, {0: {"loss": 1.0}}, missing=(1, 2)) for s in range(10)]
    assert [a.step for a in run(Environment(), [*lacks[:7], late])] == [10]
    assert run(Environment(), [*lacks, late]) == []
    assert run(Environment(), [*rest([0]), late]) == []
