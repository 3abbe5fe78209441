"""What is kept of the sentences of detectors holds on any kind of CPU, and nothing else passes."""

from __future__ import annotations

import pytest

from .said import same

KEPT = ["loss_spike warn, step 12: the loss is 3.41, 7.96 times [loss=3.40618 steps=8]"]


@pytest.mark.parametrize(
    ("now", "holds"),
    [
        (KEPT[0], True),
        (KEPT[0].replace("3.40618", "3.40631"), True),
        (KEPT[0].replace("3.41", "3.42"), True),
        (KEPT[0].replace("7.96", "8.96"), False),
        (KEPT[0].replace("steps=8", "steps=9"), False),
        (KEPT[0].replace("step 12", "step 13"), False),
        (KEPT[0].replace("7.96", "8"), False),
        (KEPT[0].replace("times", "fold"), False),
    ],
)
def test_last_digits_of_fractions_may_differ_and_nothing_else(now: str, holds: bool) -> None:
    assert same([now], KEPT) is holds
    assert not same([now, now], KEPT)
