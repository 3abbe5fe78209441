"""What is printed of a run: short numbers, and never a number where there is none."""

from __future__ import annotations

import pytest

from ddpprobe.reader.text import number


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "-"), (0.0, "0"), (3.0, "3"), (1e20, "1e+20"), (0.1234567, "0.123457"),
     (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_are_short_and_no_data_is_never_zero(value: float, text: str) -> None:
    assert number(value) == text
