"""What ranks differ in is told with the ranks that have each value."""

from __future__ import annotations

from ddpprobe.records.environment import differences, of_metas

LIBRARIES = {0: {"numpy": "1.26", "torch": "2.13"}, 3: {"numpy": "2.1", "torch": "2.13"}}


def test_the_value_of_most_ranks_comes_first() -> None:
    (found,) = differences(LIBRARIES, {0: 0, 1: 3, 2: 3, 3: 3})
    assert list(found.ranks.items()) == [("2.1", [1, 2, 3]), ("1.26", [0])]
    assert str(found) == "numpy: 2.1 on ranks 1-3, 1.26 on rank 0"


def test_of_as_many_ranks_the_lowest_come_first() -> None:
    (found,) = differences(LIBRARIES, {0: 0, 1: 3})
    assert list(found.ranks) == ["1.26", "2.1"]


def test_what_one_has_loaded_and_others_have_not_is_no_difference() -> None:
    told = {0: {"torch": "2.13", "wandb": "0.19"}, 1: {"torch": "2.13"}}
    assert differences(told, {0: 0, 1: 1, 2: 1}) == []


def test_a_rank_whose_environment_nobody_told_is_left_out() -> None:
    (found,) = differences(LIBRARIES, {0: 0, 1: 7, 3: 3})
    assert found.ranks == {"1.26": [0], "2.1": [3]}


def test_what_ranks_wrote_is_read_and_garbage_is_left_out() -> None:
    metas = [
        {"rank": 0, "environment": {"numpy": "1.26", "torch": 2}, "environment_of": 0},
        {"rank": 1, "environment": {}, "environment_of": 2},
        {"rank": 2, "environment": {"numpy": "2.1"}, "environment_of": 2},
        {"rank": 3, "environment": ["numpy"], "environment_of": "0"},
        {"rank": "4", "environment": {"numpy": "3"}, "environment_of": 0},
        {},
    ]
    environments, found = of_metas(metas)
    assert environments == {0: {"numpy": "1.26"}, 2: {"numpy": "2.1"}}
    assert [d.ranks for d in found] == [{"2.1": [1, 2], "1.26": [0]}]
