"""What the detectors say in full, in each test that has one say something: `said.json`.

A test asserts what its claim is about. What else a verdict holds is kept there: its words, its
numbers and their names, its place. After a change that is meant write it anew, and read the
difference:

    rm tests/detectors/said.json
    DDPPROBE_WRITE_SAID=1 python -m pytest -q tests/detectors
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ddpprobe.records.step import Anomaly

FILE = Path(__file__).parent / "said.json"
_WRITES = bool(os.environ.get("DDPPROBE_WRITE_SAID"))
_kept: dict[str, list[str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
_calls: dict[str, int] = {}  # of the test under way
_FRACTION = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
# A model that a test trains has other last digits on another kind of CPU, and a sentence has three.
_ROUNDED = 0.011


def check(found: Sequence[Anomaly]) -> None:
    """Compare what a detector has said with what it said before in this place of this test.

    Of verdicts that differ in their numbers alone the first one is kept.
    """
    where = re.sub(r"^.*/|\.py| \(.*\)$", "", os.environ.get("PYTEST_CURRENT_TEST", ""))
    if not where:  # nobody tests
        return
    if where not in _calls:
        _calls.clear()
    _calls[where] = _calls.get(where, 0) + 1
    place = f"{where} {_calls[where]}"
    lines = dict[str, str]()
    for each in map(_line, found):
        lines.setdefault(re.sub(r"[\d.e+-]+", "#", each), each)
    now = [*lines.values()]
    if _WRITES:
        _write(place, now)
    kept = _kept.get(place, [])
    assert same(now, kept), f"{place}: not what {FILE.name} holds, see {__file__}: {now}"


def same(now: Sequence[str], kept: Sequence[str]) -> bool:
    """Whether lines are equal but for the last digits of their fractions."""
    texts = [[_FRACTION.sub("#", line) for line in lines] for lines in (now, kept)]
    fractions = (map(float, _FRACTION.findall("\n".join(lines))) for lines in (now, kept))
    return texts[0] == texts[1] and all(
        math.isclose(a, b, rel_tol=_ROUNDED) for a, b in zip(*fractions, strict=True)
    )


def _line(one: Anomaly) -> str:
    numbers = " ".join(f"{name}={value:.6g}" for name, value in one.values.items())
    who = "-" if one.rank is None else one.rank
    return (
        f"{one.detector} {one.level}{' first cause' if one.first_cause else ''}, step {one.step} "
        f"micro {one.micro} attempt {one.attempt}, rank {who}, {one.place or '-'} in {one.phase}"
        f"{'' if one.sampled else ', unsampled'}: {one.message} [{numbers}]"
    )


def _write(place: str, lines: list[str]) -> None:
    _kept.pop(place, None)
    if lines:
        _kept[place] = lines
    FILE.write_text(json.dumps(dict(sorted(_kept.items())), indent=0) + "\n")
