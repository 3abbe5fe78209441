"""Ranks are named so that a person can read it, however many they are."""

from __future__ import annotations

import pytest

from ddpprobe.records.rank_names import numbers_text, ranks_joined, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text", "either", "both"),
    [
        ([3], "rank 3", "rank 3", "rank 3"),
        ([3, 1], "ranks 1, 3", "rank 1 or 3", "ranks 1 and 3"),
        ([0, 1, 2], "ranks 0-2", "rank 0, 1 or 2", "ranks 0, 1 and 2"),
        (range(256), "ranks 0-255", "one of ranks 0-255", "ranks 0-255"),
        ([*range(7), 8], "ranks 0-6, 8", "one of ranks 0-6, 8", "ranks 0-6, 8"),
    ],
)
def test_runs_of_many_ranks_are_ranges(ranks, text: str, either: str, both: str) -> None:
    assert (ranks_text(ranks), ranks_joined(ranks), ranks_joined(ranks, "and")) == (
        text,
        either,
        both,
    )


def test_of_many_runs_the_first_are_named() -> None:
    text = "ranks 0, 2, 4, 6, 8, 10, 12, 14"
    assert ranks_text(range(0, 16, 2)) == text
    assert ranks_text(range(0, 18, 2)) == f"{text}, ..."
    assert ranks_joined(range(0, 2000, 2)) == f"one of {text}, ..."


def test_ranks_without_the_word_are_a_few_one_by_one_or_ranges() -> None:
    assert numbers_text([]) == ""
    assert numbers_text([1, 0]) == "0, 1"
    assert numbers_text(range(2048)) == "0-2047"
    assert numbers_text([*range(7), 8]) == "0-6, 8"
