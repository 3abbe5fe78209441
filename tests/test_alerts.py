"""What `python -m tests.alerts` makes of what it played."""

from __future__ import annotations

import pytest

from .alerts.__main__ import page, row
from .alerts.cases import CASES, FAULTS, NO_FAULTS, Outcome

CASE = {case.name: case for case in CASES}
TOLD = ("DdpprobeStuck",)


@pytest.mark.parametrize(
    ("name", "told", "right"),
    [
        ("hung", (TOLD,), True),
        ("hung", (), False),
        ("hung", (TOLD, TOLD), False),
        ("hung", (("DdpprobeRunLost", "DdpprobeStuck"),), False),
        ("healthy", (), True),
        ("healthy", (TOLD,), False),
    ],
)
def test_right_is_what_was_told_once_or_silence(name, told, right):
    assert Outcome(CASE[name], told=told).is_right is right


def test_what_could_not_be_played_is_never_right():
    assert not Outcome(CASE["healthy"], trouble="it does not train").is_right


def test_a_row_says_when_and_what_and_keeps_to_its_cells():
    outcome = Outcome(CASE["hung"], 24.4, 54.0, (TOLD,), "a | b\nc", None)
    assert row(outcome) == (
        "a hung rank (SIGSTOP)", "24 s", "54 s", "DdpprobeStuck", "a \\| b c", "-",
    )  # fmt: skip


def test_the_page_has_a_row_for_each_case():
    text = page([Outcome(case) for case in CASES])
    assert [line.split(" | ")[0][2:] for line in text.splitlines() if line.endswith(" - |")] == [
        case.title for case in CASES
    ]
    assert (len(FAULTS), len(NO_FAULTS)) == (10, 7)
