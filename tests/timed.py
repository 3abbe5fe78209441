"""Detectors that judge seconds: on a busy machine what they say of healthy ranks may be true."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddpprobe.detectors.slowdown import Slowdown
from ddpprobe.detectors.straggler import Straggler
from ddpprobe.records.step import Anomaly

TIMED = frozenset({Slowdown.name, Straggler.name})
# What the first cause says of earlier warnings, if they are all of these.
_BEFORE_IT = re.compile(
    r"; warned of before it:"
    rf"(,? (?:{'|'.join(sorted(TIMED))}) at step \d+(?: \(rank \d+\))?)+(?= \(first cause\)|$)"
)


def untimed(found: Iterable[Anomaly]) -> list[Anomaly]:
    """Leave out what depends on the speed of the machine."""
    return [anomaly for anomaly in found if anomaly.detector not in TIMED]


def untimed_text(line: str) -> str:
    """Leave out of a line on a first cause that such detectors had warned before it."""
    return _BEFORE_IT.sub("", line)
